"""The plan, and what the documents say of prefix caching, on a running engine: one real vLLM on the CPU."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.plan import main
from tests.engine_args.engine import PYTHON

MODEL = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "vllm-stack/models/smollm2-135m-instruct"
BLOCK = 32


@pytest.fixture(scope="module")
def running_engine() -> Iterator[str]:
    """A real engine with a pool, a block size and a context that are none of its defaults."""
    assert MODEL.is_dir(), f"{MODEL} is missing: `make model` fetches it"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            *(str(PYTHON.parent / "vllm"), "serve", str(MODEL), "--host", "127.0.0.1", "--port", str(port)),
            *("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "3000"),
        ],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while not _healthy(url):
            assert process.poll() is None, "the engine ended before it was ready"
            assert time.monotonic() < deadline, "the engine was not ready in 300 s"
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def test_the_plan_agrees_with_a_running_engine_to_the_token(
    running_engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(MODEL), "--gpu", "cpu", "--verify", running_engine, "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["block-size"] == 32
    assert found["settings"]["max-model-len"] == 3000
    assert found["kv_cache"]["tokens"] == found["verify"]["tokens"]
    assert found["kv_cache"]["blocks"] == found["verify"]["blocks"]


# -- prefix caching ---------------------------------------------------------------------------------------------------


def hits(url: str) -> float:
    """Prompt tokens served from the prefix cache since the start."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return sum(s.value for f in families for s in f.samples if s.name == "vllm:prefix_cache_hits_total")


def complete(url: str, prompt: list[int]) -> None:
    body = {"model": str(MODEL), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def test_a_shared_prefix_hits_in_whole_blocks_only(running_engine: str) -> None:
    """Field case D6: 100 shared tokens are reused as 96 where a block holds 32."""
    shared = list(range(1000, 1100))
    complete(running_engine, shared + [1] * 40)
    before = hits(running_engine)
    complete(running_engine, shared + [2] * 40)
    assert hits(running_engine) - before == 96


def test_a_prefix_shorter_than_a_block_is_an_honest_zero(running_engine: str) -> None:
    """Field case D6: ten shared tokens."""
    shared = list(range(2000, 2010))
    complete(running_engine, shared + [3] * 100)
    before = hits(running_engine)
    complete(running_engine, shared + [4] * 100)
    assert hits(running_engine) == before


def test_a_word_that_changes_at_the_front_spoils_the_whole_prompt(running_engine: str) -> None:
    """Field case D6: why volatile text belongs last."""
    constant = list(range(3000, 3200))
    complete(running_engine, [5, *constant])
    before = hits(running_engine)
    complete(running_engine, [6, *constant])
    assert hits(running_engine) == before
