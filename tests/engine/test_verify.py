"""`make verify` and the doctor's look at a running stack, on the real engine and the real gateway."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts import verify
from scripts.checks import stack as running
from scripts.checks.probes import Probes
from scripts.checks.proof import judge, process
from scripts.checks.proof.judge import predicted_hits
from scripts.checks.proof.scrape import parse_scrape
from scripts.checks.proof.traffic import Target
from scripts.checks.subject import decide
from tests.engine.conftest import Stack, until

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], dict[str, dict[str, str]]]:
    """Exit code, the whole report, and its checks by name."""
    code = verify.main([*argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    return code, found, {check["name"]: check for check in found["checks"]}


@pytest.fixture
def log(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine's own log, as the session's fixture keeps it."""
    (path,) = tmp_path_factory.getbasetemp().glob("stack[0-9]*/engine.log")
    return path


def test_a_real_engine_passes_and_each_figure_is_its_own(
    stack: Stack, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hits = stack.engine_metric("vllm:prefix_cache_hits_total")
    code, found, checks = run(capsys, stack.engine_url, "--gateway", stack.url, "--log", str(log), "--pairs", "3")
    assert (code, found["verdict"]) == (0, "PASS"), found
    assert (found["version"], found["model"]) == ("0.32.0", stack.model)
    expected = ("start-up log", "KV blocks", "prefix cache", "gateway", "KV usage", "memory", "attention")
    assert {name: checks[name]["status"] for name in expected} == dict.fromkeys(expected, "ok"), found
    assert checks["AWQ kernel"]["status"] == "skip"
    # Three pairs past the gateway and one through it, each by whole blocks of 32: the engine counted the same.
    moved = stack.engine_metric("vllm:prefix_cache_hits_total") - hits
    assert moved == 4 * predicted_hits(528, 32) == 4 * 512
    assert "back after" in checks["KV usage"]["found"]
    assert "CPU_ATTN" in checks["attention"]["found"]


def test_another_engines_log_is_noticed(stack: Stack) -> None:
    log, check = verify.read_log(str(FIXTURES / "derived-0.10.2.log"), process.listener(stack.engine_url))
    assert (check.status, "of process 41" in check.found) == ("warn", True)
    page = parse_scrape(stack.engine.get("/metrics").text)
    blocks = judge.judge_blocks(page, log)
    assert (blocks.status, "another engine's log?" in blocks.found) == ("warn", True)


@pytest.fixture
def busy(stack: Stack) -> Iterator[None]:
    """Somebody else's short requests, one after the other."""
    stop = threading.Event()
    sent: list[int] = []

    def others() -> None:
        with httpx.Client(base_url=stack.engine_url, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                body = {"model": stack.model, "prompt": f"Request {len(sent)} of somebody", "max_tokens": 4}
                sent.append(client.post("/v1/completions", json=body).status_code)

    thread = threading.Thread(target=others)
    thread.start()
    until(lambda: len(sent) > 1, "requests of others", 30)
    yield
    stop.set()
    thread.join()
    assert set(sent) == {200}


def test_on_a_busy_engine_nothing_is_concluded(stack: Stack, busy: None) -> None:
    target = Target(stack.engine_url, stack.engine, random.Random(), None)
    target.learn_ids(stack.model)
    first = target.scrape()
    check = judge.judge_prefix([target.pair(stack.model, 144)], first)
    assert (check.status, "other requests" in check.found) == ("warn", True), check
    assert judge.verdict([check])[0] == "UNSURE"


def test_the_doctor_knows_the_running_stack(stack: Stack) -> None:
    eyes = Probes(environ={})
    subject = decide(eyes, "demo", None, None)
    found = [running.healthz(eyes, stack.url), running.readyz(eyes, stack.url)]
    found += running.engine(eyes, subject, stack.engine_url)
    ports = {"gateway": stack.url, "gateway-admin": stack.admin_url, "engine": stack.engine_url}
    found += [running.port(eyes, name, int(url.rpartition(":")[2])) for name, url in ports.items()]
    assert {check.name: check.status for check in found} == dict.fromkeys((check.name for check in found), "ok")
    assert "vLLM 0.32.0" in {check.found for check in found}
    # A gateway is not an engine, nor the other way round.
    assert running.port(eyes, "engine", int(stack.url.rpartition(":")[2])).status == "fail"
    assert running.port(eyes, "gateway", int(stack.engine_url.rpartition(":")[2])).status == "fail"


def test_the_engines_processes_are_found_by_its_port(stack: Stack) -> None:
    pid = process.listener(stack.engine_url)
    assert pid is not None
    names = {part.name() for part in process.tree(pid)}
    assert any(name.startswith("VLLM::") for name in names), names
    meter = process.meter(pid, False, Probes())
    assert meter is not None
    assert 1 << 30 < meter.read() < psutil.virtual_memory().total
