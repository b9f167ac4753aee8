"""Several workers as one gateway: shares, reports, and the account book they have in common."""

import asyncio
import contextlib
import fcntl
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accountbook import ROOM_RECORDS, SharedBook
from gateway.accounts import Accounts
from gateway.control import MAX_LINE_BYTES, Channel, Order
from gateway.errors import OverloadedError, UnavailableError
from gateway.keys import Tenant
from gateway.limits import Allowance
from gateway.listening import bind_again, bind_all
from gateway.metrics import Metrics
from gateway.settings import Settings, SettingsError
from gateway.supervisor import shared_directory
from gateway.workers import Worker, divided, restart_delay_s, whole_status


@given(total=st.integers(0, 10**9), of=st.integers(1, 64))
def test_shares_add_up_to_the_whole_and_differ_by_one_at_most(total: int, of: int) -> None:
    shares = [Worker(number, of).share(total) for number in range(1, of + 1)]
    assert sum(shares) == total
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


def test_what_bounds_the_gateway_is_divided_and_the_rest_is_as_it_was() -> None:
    settings = Settings(workers=3, auth={"disabled": True}, admission={"capacity_tokens": 10, "max_in_flight": 100})
    parts = [divided(settings, Worker(number, 3)) for number in (1, 2, 3)]
    assert [part.admission.capacity_tokens for part in parts] == [4, 3, 3]
    assert [part.admission.max_in_flight for part in parts] == [34, 33, 33]
    assert sum(part.admission.max_queue_tokens for part in parts) == settings.admission.max_queue_tokens
    assert sum(part.limits.max_arriving_bytes for part in parts) == settings.limits.max_arriving_bytes
    assert parts[0].admission.max_wait_s == settings.admission.max_wait_s
    assert parts[0].static_engines == settings.static_engines
    assert divided(settings, Worker()) is settings


def test_a_worker_is_started_again_at_once_then_ever_more_slowly_up_to_a_limit() -> None:
    assert [restart_delay_s(deaths) for deaths in range(1, 9)] == [0, 1, 2, 4, 8, 16, 30, 30]


def report(pid: int, calls: int, ready: bool = True, **admission: Any) -> dict[str, Any]:
    counts = {"capacity_tokens": 50, "in_flight": calls, "queued": 0, "drain_tokens_per_s": None, **admission}
    return {
        "worker": "?",
        "pid": pid,
        "ready": ready,
        "reason": "" if ready else "no engine",
        "draining": False,
        "replicas": [{"url": "http://a", "state": "ready", "calls": calls}],
        "admission": {**counts, "pools": [{"models": ["m"], **counts}]},
        "microbatches": {"waiting": calls},
        "advice": {"findings": []},
    }


def test_a_status_adds_up_what_is_counted_and_keeps_what_is_told() -> None:
    found = whole_status(Worker(2, 2), report(8, 3), {1: report(7, 4, drain_tokens_per_s=5.0)})
    assert found["worker"] == "2 of 2"
    assert found["replicas"] == [{"url": "http://a", "state": "ready", "calls": 7}]
    assert found["admission"]["in_flight"] == 7
    assert found["admission"]["drain_tokens_per_s"] == 5.0
    pool = found["admission"]["pools"][0]
    assert (pool["models"], pool["in_flight"], pool["capacity_tokens"]) == (["m"], 7, 100)
    assert found["microbatches"] == {"waiting": 7}
    assert [(row["worker"], row["pid"], row["in_flight"]) for row in found["workers"]] == [(1, 7, 4), (2, 8, 3)]
    assert (found["ready"], found["reason"]) == (True, "")


@pytest.mark.parametrize(
    ("other", "reason"), [(report(8, 0, ready=False), "worker 2: no engine"), (None, "worker 2: it does not answer")]
)
def test_a_gateway_is_ready_only_where_each_of_its_workers_is(other: dict[str, Any] | None, reason: str) -> None:
    found = whole_status(Worker(1, 2), report(7, 0), {2: other})
    assert (found["ready"], found["reason"]) == (False, reason)


# -- the account book --------------------------------------------------------------------------------------------------


@pytest.fixture
def books(tmp_path: Path) -> tuple[SharedBook, SharedBook]:
    return SharedBook(tmp_path / "book", Worker(1, 2)), SharedBook(tmp_path / "book", Worker(2, 2))


def test_what_one_worker_takes_the_other_sees_taken(books: tuple[SharedBook, SharedBook]) -> None:
    one, two = (Accounts(Metrics(), lambda: 100.0, book) for book in books)
    tenant = Tenant("app", concurrent=2, requests_per_minute=3)
    with one.charge(tenant, 5), two.charge(tenant, 5):
        for accounts in (one, two):
            with pytest.raises(OverloadedError, match="2 requests at once"), accounts.charge(tenant, 5):
                pass
    with one.charge(tenant, 5):
        pass
    with pytest.raises(OverloadedError, match="3 requests a minute"), two.charge(tenant, 5):
        pass
    assert [book.in_flight() for book in books] == [0, 0]


def test_tokens_not_used_come_back_to_both(books: tuple[SharedBook, SharedBook]) -> None:
    one, two = (Accounts(Metrics(), lambda: 100.0, book) for book in books)
    tenant = Tenant("app", tokens_per_minute=100)
    with one.charge(tenant, 90) as charge:
        charge.used_tokens = 10
    with two.charge(tenant, 90):
        pass
    with pytest.raises(OverloadedError, match="100 tokens a minute"), one.charge(tenant, 1):
        pass


def test_a_dead_workers_requests_are_struck_out_and_nobody_elses(books: tuple[SharedBook, SharedBook]) -> None:
    one, two = books
    for book, count in ((one, 3), (two, 2)):
        with book.account("app") as account:
            account.in_flight += count
            account.requests = Allowance(60.0, 7.0, 5.0)
    one.strike_out(1)
    with two.account("app") as account:
        assert account.in_flight == 2
        assert account.requests == Allowance(60.0, 7.0, 5.0)
        assert account.tokens is None


def test_one_that_found_no_room_tells_when_the_other_has_made_it_and_again_when_that_is_full(
    books: tuple[SharedBook, SharedBook], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = books
    for number in range(ROOM_RECORDS):
        touch(two, f"t{number}")
    with no_file_grows():
        for _ in range(2):
            with pytest.raises(UnavailableError):
                touch(one, "new")
    touch(two, "new")
    touch(one, "new")
    for number in range(ROOM_RECORDS):
        touch(two, f"u{number}")
    with no_file_grows(), pytest.raises(UnavailableError):
        touch(one, "more")
    full, room = "no room for the accounts of more keys", "there is room for the accounts of more keys"
    told = [record.getMessage() for record in caplog.records]
    assert [next(way for way in (full, room) if message.startswith(way)) for message in told] == [full, room, full]


def touch(book: SharedBook, name: str) -> None:
    with book.account(name):
        pass


@contextlib.contextmanager
def no_file_grows() -> Iterator[None]:
    """What a full disk is to a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_book_grows_beyond_its_first_size_for_every_reader(books: tuple[SharedBook, SharedBook]) -> None:
    one, two = books
    many = ROOM_RECORDS + 200
    for number in range(many):
        with (one, two)[number % 2].account(f"tenant-{number}") as account:
            account.in_flight += number
    assert len(one) == len(two) == many
    for number in range(many):
        with two.account(f"tenant-{number}") as account:
            assert account.in_flight == number


_TAKER = """
import sys
from pathlib import Path
from gateway.accountbook import SharedBook
from gateway.workers import Worker
book = SharedBook(Path(sys.argv[1]), Worker(int(sys.argv[2]), 2))
for _ in range(5000):
    with book.account("app") as account:
        account.in_flight += 1
        account.requests.level -= 1
"""


def test_two_processes_lose_no_step_of_each_other(tmp_path: Path) -> None:
    book = SharedBook(tmp_path / "book", Worker(1, 2))
    with book.account("app") as account:
        account.requests = Allowance(60.0, 20_000.0, 5.0)
    takers = [subprocess.Popen([sys.executable, "-c", _TAKER, str(tmp_path / "book"), number]) for number in "12"]
    assert [taker.wait(30) for taker in takers] == [0, 0]
    with book.account("app") as account:
        assert account.in_flight == 10_000
        assert account.requests is not None
        assert account.requests.level == 10_000


# -- sockets, channel, directory ---------------------------------------------------------------------------------------


def test_sockets_share_a_port_with_each_other_and_with_nobody_else() -> None:
    sockets = bind_all("127.0.0.1:0", "listen", 3)
    port = sockets[0].getsockname()[1]
    try:
        assert {sock.getsockname()[1] for sock in sockets} == {port}
        with pytest.raises(SettingsError, match=r"^listen = '127.0.0.1:.*': Address already in use"):
            bind_all(f"127.0.0.1:{port}", "listen", 3)
        sockets.pop().close()
        sockets.append(bind_again(sockets[0]))
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
        accepted = [_accept_all(sock) for sock in sockets]
        assert sum(accepted) == 60
        assert min(accepted) > 3, accepted
        for client in clients:
            client.close()
    finally:
        for sock in sockets:
            sock.close()


def _accept_all(sock: socket.socket) -> int:
    sock.setblocking(False)
    count = 0
    while True:
        try:
            sock.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


async def talk(serve: Callable[[Order], Any]) -> tuple[Channel, Channel, list[asyncio.Task[None]]]:
    async def answer(order: Order) -> Any:
        return serve(order)

    ends = [await Channel.open(sock, answer) for sock in socket.socketpair()]
    return ends[0], ends[1], [asyncio.create_task(end.run()) for end in ends]


async def test_both_ends_of_a_channel_ask_and_are_answered() -> None:
    one, two, running = await talk(lambda order: [order["what"], order.get("n")])
    answers = await asyncio.gather(*(end.ask("x", 5, n=n) for n in range(20) for end in (one, two)))
    assert answers == [["x", n] for n in range(20) for _ in range(2)]
    running[0].cancel()
    await asyncio.wait(running, timeout=5)
    assert all(task.done() for task in running)
    assert await two.ask("x", 5) is None


async def test_an_order_that_fails_is_answered_with_nothing_and_the_channel_goes_on() -> None:
    def serve(order: Order) -> int:
        return 1 // order["n"]

    one, _, running = await talk(serve)
    assert await one.ask("x", 5, n=0) is None
    assert await one.ask("x", 5, n=1) == 1
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_an_answer_longer_than_a_line_may_be_is_none_and_the_channel_goes_on() -> None:
    one, two, running = await talk(lambda order: "x" * (MAX_LINE_BYTES if order["n"] else 1))
    assert await one.ask("x", 5, n=1) is None
    assert await one.ask("x", 5, n=0) == "x"
    assert not one.closed and not two.closed
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def test_silence_is_no_answer() -> None:
    ours, its = socket.socketpair()

    async def nobody(order: Order) -> None:
        raise AssertionError(order)

    channel = await Channel.open(ours, nobody)
    assert await channel.ask("alive", 0.05) is None
    assert not channel.closed
    its.close()
    await channel.run()
    assert channel.closed


def test_where_no_directory_can_be_is_told(tmp_path: Path) -> None:
    expected = r"nowhere: No such file or directory; expected room for what"
    with pytest.raises(SettingsError, match=expected), shared_directory(tmp_path / "nowhere"):
        pass


def test_a_directory_goes_with_its_gateway_and_with_the_next_one_where_it_was_killed(tmp_path: Path) -> None:
    with shared_directory(tmp_path) as lives:
        dead = tmp_path / "gateway-dead"
        dead.mkdir()
        (dead / "held").touch()
        unborn = tmp_path / "gateway-unborn"
        unborn.mkdir()
        with shared_directory(tmp_path) as new:
            assert {path.name for path in tmp_path.iterdir()} == {lives.name, new.name, "gateway-unborn"}
            assert oct(new.stat().st_mode)[-3:] == "700"
            descriptor = os.open(new / "held", os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
        assert lives.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["gateway-unborn"]
