"""The engine's own load generator, `vllm bench serve`, as a client of the gateway."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from scripts import demo, model_fetch
from tests.conformance.conftest import Front

REQUESTS = 24


def test_vllm_bench_serve_fails_no_request_and_its_counts_are_the_gateways(front: Front, tmp_path: Path) -> None:
    chat = {"route": "/v1/chat/completions", "tenant": "app1"}
    names = ("gateway_requests_total", "gateway_time_to_first_token_seconds_count", "gateway_tokens_total")
    labels = ({**chat, "status": "200"}, {"route": chat["route"]}, {"tenant": "app1", "kind": "generation"})
    before = [front.metric(name, **wanted) for name, wanted in zip(names, labels, strict=True)]
    refused = front.metric("gateway_requests_total", **chat) - before[0]
    command = [str(demo.ROOT / ".venv-engine/bin/vllm"), "bench", "serve", "--backend", "openai-chat"]
    command += ["--base-url", front.url, "--endpoint", chat["route"], "--model", front.model]
    command += ["--tokenizer", str(model_fetch.model_dir()), "--dataset-name", "random", "--num-prompts", str(REQUESTS)]
    command += ["--random-input-len", "24", "--random-output-len", "8", "--max-concurrency", "8", "--ignore-eos"]
    command += [
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "bench.json",
    ]
    environment = {**os.environ, "OPENAI_API_KEY": front.key, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ran = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    gained = [front.metric(name, **wanted) - was for name, wanted, was in zip(names, labels, before, strict=True)]
    asked = gained[0]  # it asks once more before the measurement, to see that the server answers
    assert asked - REQUESTS in (0, 1)
    # An answer of nothing but special tokens has no text, so no first one either.
    told = sum(bool(text) for text in result["generated_texts"])
    assert told > REQUESTS // 2
    assert 0 <= gained[1] - told <= asked - REQUESTS
    assert gained[2] == result["total_output_tokens"] + 8 * (asked - REQUESTS)
    assert front.metric("gateway_requests_total", **chat) - before[0] - asked == refused
