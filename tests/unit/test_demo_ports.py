"""Where the demo listens: taken ports are told at once, and the doctor finds a demo that runs."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import _ports, _prometheus, demo
from tests.unit.test_demo import until


@pytest.mark.parametrize("wrong", ["99999", "0", "-1", "abc"])
def test_what_is_no_port_is_refused_in_words(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([f"--port={wrong}"])
    assert f"'{wrong}' is no port: expected 1 to 65535" in capsys.readouterr().err


def test_all_taken_ports_are_named_at_once_with_their_holders_and_the_options_that_change_them() -> None:
    with _listening() as (port, server), _listening() as (other, second):
        with pytest.raises(demo.DemoError) as caught:
            demo.check_ports(demo.Ports(port, _ports.free_port(), other))
        with pytest.raises(demo.DemoError, match=rf"^port taken: {port} by .* stop that, or choose another port with"):
            demo.check_ports(demo.Ports(port, *(_ports.free_port() for _ in range(2))))
    line = str(caught.value)
    told = re.fullmatch(
        rf"ports taken: {port} by .* \(pid {server.pid}\), {other} by .* \(pid {second.pid}\): stop them, "
        r"or choose other ports with make demo ARGS='--port (\d+) --engine-port (\d+)'",
        line,
    )
    assert told, line
    assert int(told[1]) > port
    assert int(told[2]) > other


@contextlib.contextmanager
def _listening() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = _ports.free_port()
    with subprocess.Popen([sys.executable, "-m", "http.server", str(port), "--bind", _ports.HOST]) as server:
        try:
            until(lambda: not _ports.is_free(port), "the server listens")
            yield port, server
        finally:
            server.kill()


def test_free_ports_above_are_free_different_and_not_asked_for_already() -> None:
    first = _ports.free_port()
    found = _ports.free_above([first, first], [first + 1])
    assert len(set(found)) == 2
    assert first + 1 not in found
    assert min(found) > first


def test_a_demo_that_runs_is_found_by_what_it_wrote_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    ports = demo.Ports(8081, 9001, 8001, 9091)
    assert demo.running_ports(tmp_path, lambda _: True) == demo.Ports()
    monkeypatch.setattr(_prometheus, "write_configuration", lambda *_: None)
    demo.prepare(demo.plan(ports, Path("/m"), Path("/bin/prometheus")))
    assert demo.running_ports(tmp_path, lambda port: port == 8081) == ports
    assert demo.running_ports(tmp_path, lambda _: False) == demo.Ports(), "it has ended"
    demo.prepare(demo.plan(demo.Ports(prometheus=9090), Path("/m"), Path("/bin/prometheus")))
    assert demo.running_ports(tmp_path, lambda _: True) == demo.Ports(prometheus=9090)
    (tmp_path / ".demo" / "8080" / demo.RECORD).write_text("{")
    assert demo.running_ports(tmp_path, lambda _: True) == ports
