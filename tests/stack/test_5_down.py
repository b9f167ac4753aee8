"""Stopping: streams end first, data stays; and a first start that fails leaves nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.stack.checkout import MODEL, Stack, until


def containers(stack: Stack) -> list[str]:
    return stack.compose("ps", "--all", "--quiet").stdout.split()


@pytest.mark.ci
def test_down_ends_the_streams_first_and_keeps_the_volumes(stack: Stack, summary: dict[str, Any]) -> None:
    until(stack.ready, "a ready engine", 300)
    lines: list[str] = []
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Tell a long story."}], "stream": True}

    def read() -> None:
        options = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
        url = f"{stack.url}/v1/chat/completions"
        with stack.http.stream("POST", url, json=body | options, headers=stack.headers) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    stream = threading.Thread(target=read)
    stream.start()
    until(lambda: len(lines) > 20, "a stream that has begun", 60)
    began = time.monotonic()
    down = stack.make("down")
    summary["down_with_a_stream_s"] = round(time.monotonic() - began, 1)
    stream.join(timeout=60)
    assert down.returncode == 0, down.stderr
    assert lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)
    assert containers(stack) == []
    volumes = stack.docker("volume", "ls", "--quiet", "--filter", "label=com.docker.compose.project=vllm-stack-test")
    assert {name.rpartition("_")[2] for name in volumes.split()} >= {"gateway-data", "prometheus-data", "engine-cache"}


def test_a_start_on_the_volumes_of_before_takes_only_the_engines_start(stack: Stack, summary: dict[str, Any]) -> None:
    """Warm: images, model, compile cache and Prometheus's data are there."""
    assert containers(stack) == []
    began = time.monotonic()
    up = stack.make("up-cpu")
    summary["warm_up_s"] = round(time.monotonic() - began, 1)
    assert up.returncode == 0, up.stdout + up.stderr
    assert stack.chat().status_code == 200
    assert stack.make("down", "ARGS=--grace-s 10").returncode == 0


def test_a_first_start_that_fails_names_the_cause_and_leaves_nothing(stack: Stack, summary: dict[str, Any]) -> None:
    assert containers(stack) == []
    began = time.monotonic()
    failed = stack.make("up-cpu", ENGINE_ARGS="--no-such-flag")
    summary["refused_argument_s"] = round(time.monotonic() - began, 1)
    assert failed.returncode != 0
    assert "unrecognized arguments: --no-such-flag" in failed.stderr.splitlines()[0]
    assert containers(stack) == []


def test_too_little_memory_is_named(stack: Stack, summary: dict[str, Any]) -> None:
    began = time.monotonic()
    failed = stack.make("up-cpu", ENGINE_MEMORY="700m")
    summary["faults"]["out of memory at start"] = {"given_up_s": round(time.monotonic() - began, 1), "starts": 3}
    assert failed.returncode != 0
    assert "ENGINE_MEMORY" in failed.stderr.splitlines()[0]
    assert containers(stack) == []


def test_a_mistake_in_the_settings_stops_it_before_anything_starts(stack: Stack) -> None:
    """A misspelt name in .env, a profile and a model that are not there: one message each, and nothing to take back."""
    absent = "model: /models/absent/current\nmax-model-len: 2048\nkv-cache-memory-bytes: 512M\n"
    (stack.root / "configs/engine/absent.cpu.yaml").write_text(absent, encoding="utf-8")
    path = stack.root / ".env"
    good = path.read_text(encoding="utf-8")
    try:
        for right, wrong, told in (
            ("GATEWAY_PORT=", "GATEWAY_PROT=", "did you mean GATEWAY_PORT?"),
            ("ENGINE_PROFILE=smollm2-135m", "ENGINE_PROFILE=smollm2-135", "smollm2-135.cpu.yaml"),
            ("ENGINE_PROFILE=smollm2-135m.cpu", "ENGINE_PROFILE=absent.cpu", "models/absent/current does not exist"),
        ):
            assert good.count(f"\n{right}") == 1
            path.write_text(good.replace(f"\n{right}", f"\n{wrong}"), encoding="utf-8")
            refused = stack.make("up-cpu")
            assert refused.returncode != 0
            assert told in refused.stdout + refused.stderr
            assert "nothing was started" in refused.stderr
            assert containers(stack) == []
    finally:
        path.write_text(good, encoding="utf-8")
