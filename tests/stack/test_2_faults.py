"""Something breaks under a running load: what clients saw, what healed by itself, and in what time.

Figures go into the summary, and from there into docs/faults.md. Limits here are far above what is measured: they tell
"heals" from "does not", on a busy machine too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.stack.checkout import MODEL, Stack, until
from tests.stack.conftest import Docker
from tests.stack.load import ANSWERED, CUT, ERROR_EVENT, NO_CONNECTION, Load

UNAVAILABLE = "HTTP 503"
ENGINE_HEALS_S = 300  # a boot takes 50 s alone on the machine


def starts(stack: Stack) -> int:
    """How often the supervisor has started the engine in this container."""
    return int(json.loads(stack.python("engine-cpu", "print(open('/tmp/engine-state.json').read())"))["starts"])


def engine_ready(stack: Stack) -> bool:
    return bool(stack.inspect("engine-cpu")["State"]["Health"]["Status"] == "healthy") and stack.ready()


@pytest.fixture(autouse=True)
def _whole(stack: Stack) -> None:
    """Each fault meets a stack that is whole again."""
    until(lambda: engine_ready(stack), "a ready engine", ENGINE_HEALS_S)


def settle(load: Load, count: int = 6) -> float:
    """Waits until the load is answered, and returns the moment."""
    until(lambda: load.outcomes().get(ANSWERED, 0) >= count, "answers before the fault", 120)
    assert set(load.outcomes()) == {ANSWERED}
    return time.monotonic()


def healed(load: Load, fault_s: float, limit_s: float) -> float:
    until(lambda: load.answered_after(fault_s) is not None, "an answer after the fault", limit_s)
    found = load.answered_after(fault_s)
    assert found is not None
    return found


def note(summary: dict[str, Any], name: str, load: Load, fault_s: float, heal_s: float | None) -> dict[str, int]:
    outcomes = load.outcomes(fault_s)
    summary["faults"][name] = {
        "heal_s": None if heal_s is None else round(heal_s, 1),
        "clients_saw": outcomes,
        "longest_answered_s": round(load.longest_s(fault_s), 1),
    }
    return outcomes


def newest_sample_s(stack: Stack) -> float | None:
    """The wall clock's time of the newest sample that Prometheus has of the gateway; None while it answers none."""
    url = f"http://127.0.0.1:{stack.ports['PROMETHEUS_PORT']}/api/v1/query"
    try:
        answer = stack.http.get(url, params={"query": "max(timestamp(up{job='gateway'}))"})
        return float(answer.json()["data"]["result"][0]["value"][1])
    except (httpx.HTTPError, ValueError, LookupError):
        return None


def refusals_say_when(load: Load, fault_s: float) -> bool:
    return all(s.retry_after for s in load.seen if s.ended_s >= fault_s and s.outcome == UNAVAILABLE)


def test_prometheus_down_is_nothing_to_the_clients(stack: Stack, summary: dict[str, Any]) -> None:
    with Load(stack) as load:
        fault_s = settle(load)
        assert stack.compose("stop", "prometheus").returncode == 0
        before = len(load.seen)
        until(lambda: len(load.seen) > before + 12, "answers without Prometheus", 120)
        outcomes = note(summary, "prometheus stopped", load, fault_s, 0.0)
        assert stack.compose("start", "prometheus").returncode == 0
    assert set(outcomes) == {ANSWERED}
    until(lambda: stack.inspect("prometheus")["State"]["Health"]["Status"] == "healthy", "Prometheus back", 120)


def test_a_full_disk_under_prometheus_is_nothing_to_the_clients(stack: Stack, summary: dict[str, Any]) -> None:
    """A real file system of 24 MB, filled to its last byte, then freed: figures stop and come back by themselves."""
    small = {**stack.env, "COMPOSE_FILE": f"{stack.env['COMPOSE_FILE']}:tests/stack/small-disk.yaml"}
    laid_over = replace(stack, env=small)
    up = laid_over.make("up-cpu")
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        until(lambda: newest_sample_s(stack) is not None, "a first scrape", 60)
        with Load(stack) as load:
            fault_s = settle(load)
            fill = "head -c 100m /dev/zero > /prometheus/filler"
            assert "No space left" in laid_over.compose("exec", "-T", "prometheus", "sh", "-c", fill).stderr
            stopped = time.time()
            until(lambda: "no space left on device" in laid_over.logs("prometheus"), "a complaint in its log", 60)
            until(lambda: time.time() - stopped > 15 and len(load.seen) > 12, "answers with a full disk", 120)
            stale_s = time.time() - (newest_sample_s(stack) or 0)
            outcomes = note(summary, "prometheus disk full", load, fault_s, 0.0)
            freed = time.time()
            assert laid_over.compose("exec", "-T", "prometheus", "rm", "/prometheus/filler").returncode == 0
            until(lambda: (newest_sample_s(stack) or 0) > freed, "a scrape that is kept", 120)
            back_s = time.time() - freed
        assert set(outcomes) == {ANSWERED}
        assert stale_s > 10  # it really kept nothing meanwhile
        summary["faults"]["prometheus disk full"] |= {"figures_back_s": round(back_s, 1)}
    finally:
        assert stack.make("up-cpu").returncode == 0
        # `down` knows only the volumes that compose.yaml names.
        stack.docker("volume", "rm", f"{stack.env['COMPOSE_PROJECT_NAME']}_prometheus-small")
    until(lambda: stack.inspect("prometheus")["State"]["Health"]["Status"] == "healthy", "Prometheus back", 120)


@pytest.mark.ci
def test_a_killed_gateway_is_back_within_seconds(stack: Stack, summary: dict[str, Any]) -> None:
    """Its streams are cut, which no server can soften; nothing else is lost, and Docker starts it again."""
    restarts = stack.inspect("gateway")["RestartCount"]
    with Load(stack) as load:
        fault_s = settle(load)
        assert stack.signal("gateway", "python -m gateway", signal.SIGKILL)
        heal_s = healed(load, fault_s, 60)
        outcomes = note(summary, "gateway killed", load, fault_s, heal_s)
    assert stack.inspect("gateway")["RestartCount"] == restarts + 1
    assert set(outcomes) <= {ANSWERED, CUT, NO_CONNECTION, UNAVAILABLE}
    assert outcomes.get(CUT, 0) <= 6
    assert heal_s < 30
    assert refusals_say_when(load, fault_s)


def test_a_long_prefill_is_never_taken_for_a_hang(stack: Stack, summary: dict[str, Any]) -> None:
    """No token for more than 20 s, alone and under load: the watchdog and the gateway leave the engine alone."""
    before = starts(stack)
    numbers = " ".join(str(number) for number in range(1500))  # some 6,400 tokens, none of them cached
    for name, clients in (("alone", 0), ("under load", 4)):
        with Load(stack, clients=clients) as load:
            if clients:
                settle(load, clients)
            began = time.monotonic()
            answer = stack.chat(f"{name}: which number is missing? {numbers}", max_tokens=1)
            took = time.monotonic() - began
            assert answer.status_code == 200, answer.text
            assert took > 20
            summary.setdefault("long_prefill", {})[name] = {
                "tokens": answer.json()["usage"]["prompt_tokens"],
                "seconds": round(took, 1),
            }
            assert stack.ready()
        assert set(load.outcomes()) <= {ANSWERED}
    assert starts(stack) == before


@pytest.mark.ci
def test_a_dead_engine_core_is_replaced_while_clients_wait(stack: Stack, summary: dict[str, Any]) -> None:
    """What had begun ends with an error event; who comes then waits in the gateway or is told when to come again."""
    before = starts(stack)
    with Load(stack) as load:
        fault_s = settle(load)
        assert stack.signal("engine-cpu", "VLLM::EngineCore", signal.SIGKILL)
        heal_s = healed(load, fault_s, ENGINE_HEALS_S)
        outcomes = note(summary, "engine core killed", load, fault_s, heal_s)
    assert starts(stack) == before + 1
    assert set(outcomes) <= {ANSWERED, ERROR_EVENT, UNAVAILABLE, "HTTP 502"}
    assert refusals_say_when(load, fault_s)


def test_a_hung_engine_is_restarted_by_its_watchdog(stack: Stack, summary: dict[str, Any]) -> None:
    """Stopped processes keep their sockets, and /health may still say 200: only progress tells."""
    before = starts(stack)
    with Load(stack) as load:
        fault_s = settle(load)
        assert stack.signal("engine-cpu", "VLLM::", signal.SIGSTOP)
        heal_s = healed(load, fault_s, ENGINE_HEALS_S)
        outcomes = note(summary, "engine hung", load, fault_s, heal_s)
    assert starts(stack) == before + 1
    assert "killing the engine: no forward progress for 6" in stack.logs("engine-cpu")
    assert set(outcomes) <= {ANSWERED, ERROR_EVENT, UNAVAILABLE, "HTTP 502"}
    assert refusals_say_when(load, fault_s)
    assert heal_s > 60  # it was given its time


def test_the_stack_comes_back_alone_when_docker_restarts(stack: Stack, docker: Docker, summary: dict[str, Any]) -> None:
    """What a restart of the daemon, or of the machine, does: nobody starts anything by hand."""
    if not docker.ours:
        pytest.skip("this Docker engine was not started by the tests: it is not theirs to restart")
    daemon = int(Path(docker.env["DOCKER_HOST"].removeprefix("unix://")).with_name("docker.pid").read_text())
    with Load(stack) as load:
        fault_s = settle(load)
        os.kill(daemon, signal.SIGTERM)
        stopped_s = until(lambda: not psutil.pid_exists(daemon), "the daemon's end", 200)
        start = [f"{os.environ['DOCKER_OFFLINE_DIR']}/start-docker.sh"]
        subprocess.run(start, env=os.environ | docker.env, check=True, capture_output=True)
        heal_s = healed(load, fault_s, ENGINE_HEALS_S)
        note(summary, "docker restarted", load, fault_s, heal_s)
        summary["faults"]["docker restarted"]["daemon_stopped_s"] = round(stopped_s, 1)
    running = stack.compose("ps", "--services", "--status", "running").stdout.split()
    assert sorted(running) == summary["started"]


def test_an_engine_that_cannot_start_is_tried_three_times_and_then_the_old_one_is_back(
    stack: Stack, summary: dict[str, Any]
) -> None:
    """Field case G7: no hot loop, the cause in one line, and a running stack survives its operator's mistake."""
    began = time.monotonic()
    failed = stack.make("up-cpu", ENGINE_ARGS="--max-model-len 200000")
    took = time.monotonic() - began
    assert failed.returncode != 0
    assert "gave up: the engine did not start (3 of 3 times): " in failed.stderr
    assert "max_model_len" in failed.stderr.splitlines()[0]
    assert "Traceback" not in failed.stderr.splitlines()[0]
    assert "going back to the engine before" in failed.stdout
    back_s = until(lambda: engine_ready(stack), "the old engine", ENGINE_HEALS_S)
    assert stack.chat().status_code == 200
    summary["faults"]["engine cannot start"] = {
        "given_up_s": round(took, 1), "heal_s": round(took + back_s, 1), "starts": 3, "model": MODEL,
    }  # fmt: skip
