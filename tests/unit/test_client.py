"""The client's side: who is watched, and until when."""

import asyncio
import time

import pytest

from gateway.client import ClientGoneError, ClientSink, ClientWatch, Message
from gateway.exchange import Exchange, Reply


class Connection:
    """An ASGI server's side of one request: like Uvicorn, it reports a disconnect also after a complete answer."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.over = asyncio.Event()
        self.told = asyncio.Event()  # that it is over

    async def receive(self) -> Message:
        await self.over.wait()
        self.told.set()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.over.set()

    def sink(self) -> ClientSink:
        return ClientSink(self.send, Exchange("id", "id", 0.0, "other"), time.monotonic)


async def test_a_leaving_client_ends_its_task_with_an_error_of_its_own() -> None:
    connection = Connection()
    asyncio.get_running_loop().call_later(0.01, connection.over.set)
    with pytest.raises(ClientGoneError), ClientWatch(connection.receive, connection.sink()):
        await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_work_after_a_complete_answer_is_not_taken_for_a_departure(stream: bool) -> None:
    connection = Connection()
    sink = connection.sink()
    with ClientWatch(connection.receive, sink):
        await asyncio.sleep(0)
        if stream:
            await sink.start()
            await sink.events(b"data: x\n\n")
            await sink.end()
        else:
            await sink.whole(Reply(200, b"{}"))
        async with asyncio.timeout(5):
            await connection.told.wait()  # a watch that took it for a departure would end this wait
        await asyncio.sleep(0)
    assert connection.sent[-1]["more_body"] is False


async def test_a_cancelled_task_stays_cancelled_though_its_client_leaves_too() -> None:
    connection, serving = Connection(), asyncio.Event()

    async def serve() -> None:
        with ClientWatch(connection.receive, connection.sink()):
            serving.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(serve())
    await serving.wait()
    connection.over.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_and_a_departure_in_one_step_count_as_a_departure() -> None:
    connection = Connection()
    asyncio.get_running_loop().call_later(0.02, connection.over.set)
    with pytest.raises(ClientGoneError), ClientWatch(connection.receive, connection.sink()):
        async with asyncio.timeout(None) as limit:
            asyncio.get_running_loop().call_later(0.02, lambda: limit.reschedule(0))
            await asyncio.sleep(60)


async def test_a_watch_leaves_no_task_behind() -> None:
    connection = Connection()
    before = asyncio.all_tasks()
    with ClientWatch(connection.receive, connection.sink()):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
