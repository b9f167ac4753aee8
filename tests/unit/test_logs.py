"""The thread that writes the log: whoever hands lines over never waits, and what is lost is counted."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.logs import LineWriter


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def fill(end: int) -> int:
    """Write into a pipe until it takes no more; how many bytes that were."""
    os.set_blocking(end, False)
    written = 0
    try:
        while True:
            written += os.write(end, b"x")
    except BlockingIOError:
        os.set_blocking(end, True)
    return written


def read_lines(end: int, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\n") < count:
        assert select.select([end], [], [], 5)[0], data
        data += os.read(end, 65536)
    return data.splitlines()


def test_lines_are_written_in_order_and_the_last_ones_by_close(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1])
    for number in range(1000):
        writer.put(b"%d\n" % number)
    writer.close()
    assert read_lines(pipe[0], 1000) == [b"%d" % number for number in range(1000)]


def test_while_nobody_reads_lines_wait_then_drop_and_are_told_once_somebody_does(pipe: tuple[int, int]) -> None:
    filled = fill(pipe[1])
    writer, dropped = LineWriter(pipe[1], max_lines=10), []
    writer.on_drop = lambda: dropped.append(1)
    began = time.monotonic()
    for number in range(100):
        writer.put(b"%d\n" % number)
    assert time.monotonic() - began < 1
    assert 80 <= len(dropped) <= 90
    os.read(pipe[0], filled)
    *kept, told = read_lines(pipe[0], 100 - len(dropped) + 1)
    assert kept == [b"%d" % number for number in range(len(kept))]
    assert json.loads(told)["event"] == "log lines were dropped"
    assert json.loads(told)["lines"] == len(dropped)
    writer.close()


def test_close_waits_for_a_reader_no_longer_than_its_time(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.logs.CLOSE_S", 0.1)
    filled = fill(pipe[1])
    writer = LineWriter(pipe[1])
    writer.put(b"x\n")
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 1
    os.read(pipe[0], filled)  # lets the thread end


def test_a_descriptor_that_others_made_non_blocking_loses_nothing(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    writer = LineWriter(pipe[1])
    line = b"y" * 99_999 + b"\n"
    for _ in range(5):
        writer.put(line)
    assert read_lines(pipe[0], 5) == [line[:-1]] * 5
    writer.close()


def test_a_reader_that_is_gone_costs_lines_and_nothing_else(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer, dropped = LineWriter(pipe[1]), []
    writer.on_drop = lambda: dropped.append(1)
    writer.put(b"x\n")
    writer.put(b"y\n")
    writer.close()
    assert len(dropped) == 2


_WRITERS = """
import os, sys
from gateway.logs import LineWriter
turn = os.open(sys.argv[1], os.O_RDWR) if len(sys.argv) > 1 else None
writer = LineWriter(2, turn=turn)
for _ in range(200):
    writer.put(sys.argv[2].encode() * 6000 + b"\\n")
while writer._lines.qsize():
    pass
print("in the middle of it", flush=True)
writer._lines.put(None)
writer._thread.join()
"""


def test_lines_of_two_processes_do_not_run_into_each_other(tmp_path: Path) -> None:
    (tmp_path / "turn").touch()
    reading, writing = os.pipe()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITERS, str(tmp_path / "turn"), letter], stdout=subprocess.PIPE, stderr=writing
        )
        for letter in "ab"
    ]
    os.close(writing)
    for writer in writers:
        assert writer.stdout is not None
        with writer.stdout:
            writer.stdout.readline()
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert [writer.wait(10) for writer in writers] == [0, 0]
    assert sorted(set(lines)) == [b"a" * 6000, b"b" * 6000]
    assert len(lines) == 400
