"""When a silent worker is given up: soon where it can't answer any more, late where it may only be kept from it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.silence import ASLEEP_LOOKS, HANG_S, LOOK_S, SPIN_CPU_S, STOPPED_LOOKS, Look, Silence, look_at


def looks_until_given_up(looks: Iterator[Look | None]) -> tuple[int, str]:
    silence = Silence()
    for count, look in enumerate(looks, 1):
        if (why := silence.verdict(look)) is not None:
            return count, why
    raise AssertionError("never given up")


def always(state: str, switches: int = 0, cpu_s: float = 0.0) -> Iterator[Look]:
    """Every look adds so many switches and seconds of CPU to the one before."""
    ran = 0
    while True:
        yield Look(state, 100 + ran * switches, 7.0 + ran * cpu_s)
        ran += 1


@pytest.mark.parametrize(("state", "looks"), [("T", STOPPED_LOOKS), ("t", STOPPED_LOOKS), ("S", ASLEEP_LOOKS)])
def test_a_worker_that_is_not_scheduled_is_given_up_within_seconds(state: str, looks: int) -> None:
    count, why = looks_until_given_up(always(state))
    assert count == looks + 1
    assert count * LOOK_S <= 5
    assert why == f"{'stuck' if state == 'S' else 'stopped'}, no answer for {count * LOOK_S:g} s"


def test_one_that_is_stopped_is_given_up_before_those_that_sleep_for_its_lock() -> None:
    assert (STOPPED_LOOKS + 2) * LOOK_S < ASLEEP_LOOKS * LOOK_S


@pytest.mark.parametrize(
    ("state", "switches", "cpu_s"),
    [("R", 0, 0.0), ("R", 3, 0.01), ("D", 2, 0.0), ("D", 0, 0.0), ("S", 1, 0.0), ("S", 0, 0.01)],
    ids=["runnable, never run", "starved", "paging", "a disk that hangs", "woken", "woken, switches not told"],
)
def test_one_that_load_keeps_from_answering_has_the_long_wait(state: str, switches: int, cpu_s: float) -> None:
    count, why = looks_until_given_up(always(state, switches, cpu_s))
    assert count * LOOK_S == HANG_S
    assert why == "no answer for 30 s"


def test_one_that_spins_is_given_up_by_the_cpu_it_used_not_by_the_clock() -> None:
    count, why = looks_until_given_up(always("R", 5, LOOK_S))
    assert (count - 1) * LOOK_S == SPIN_CPU_S
    assert why == "busy with one thing for 5.0 s of CPU, no answer"
    slower, _ = looks_until_given_up(always("R", 5, LOOK_S / 4))
    assert slower == 4 * (count - 1) + 1


def test_one_that_stood_still_and_then_moves_begins_anew() -> None:
    silence = Silence()
    for _ in range(STOPPED_LOOKS):
        assert silence.verdict(Look("T", 5, 1.0)) is None
    assert silence.verdict(Look("S", 6, 1.0)) is None
    for _ in range(STOPPED_LOOKS - 1):
        assert silence.verdict(Look("T", 6, 1.0)) is None
    assert silence.verdict(Look("T", 6, 1.0)) is not None


def test_where_the_kernel_tells_nothing_there_is_the_long_wait() -> None:
    count, _ = looks_until_given_up(iter([None] * 1000))
    assert count * LOOK_S == HANG_S
    assert look_at(2**22 + 1) is None


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", f"print(flush=True); {program}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def seen(pid: int, state: str) -> Look:
    deadline = time.monotonic() + 10
    while (look := look_at(pid)) is None or look.state != state:
        assert time.monotonic() < deadline, look
        time.sleep(0.01)
    return look


def test_the_kernel_tells_a_process_that_runs_from_one_that_sleeps_and_one_that_is_stopped() -> None:
    with child("exec('while True: pass')") as busy, child("input()") as asleep:
        before = seen(busy.pid, "R")
        deadline = time.monotonic() + 10
        while (now := look_at(busy.pid)) is not None and now.cpu_s <= before.cpu_s:
            assert time.monotonic() < deadline
        first = seen(asleep.pid, "S")
        assert look_at(asleep.pid) == first
        busy.send_signal(signal.SIGSTOP)
        stopped = seen(busy.pid, "T")
        assert stopped.stopped
        assert look_at(busy.pid) == stopped
