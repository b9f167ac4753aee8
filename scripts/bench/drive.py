"""One measurement: sends a row's requests and says what came back.

Streams are sent by `vllm bench serve`, the engine's own load generator. It has no other way of asking, so whole
answers, which is what the gateway merges, are asked for in a closed loop here. Both return the same figures.
"""

from __future__ import annotations

import asyncio
import collections
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from scripts.bench.engine import Target
from scripts.bench.generator import Generator
from scripts.bench.plan import Row
from scripts.bench.workloads import Request

QUANTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BACKENDS = {"chat": "openai-chat", "completions": "openai"}


class DriveError(Exception):
    """The load generator failed, or no request came back whole; the message is one line."""


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentile to milliseconds; None where nothing was measured."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {str(q): round(ordered[min(last, int(q / 100 * len(ordered)))] * 1000, 3) for q in QUANTILES}


def measure(
    row: Row, requests: Sequence[Request], target: Target, *, generator: Generator, tokenizer: str, folder: Path
) -> dict[str, Any]:
    """One repeat: counts, rates, quantiles in ms, errors by text. Raises DriveError and OSError."""
    url = target.gateway if row.through == "gateway" else target.engine
    if url is None:
        raise DriveError(f"{row.name} goes through the gateway, and there is none")
    if row.stream:
        result = _streamed(row, requests, target, url, generator, tokenizer, folder)
    else:
        result = asyncio.run(_whole(row, requests, target, url))
    if not result["completed"]:
        worst = next(iter(result["errors"]), "no reason given")
        raise DriveError(f"not one of {len(requests)} requests was answered: {worst}")
    return result


def _streamed(
    row: Row, requests: Sequence[Request], target: Target, url: str, generator: Generator, tokenizer: str, folder: Path
) -> dict[str, Any]:
    data, output, log = folder / "requests.jsonl", folder / "bench.json", folder / "bench.log"
    data.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests))
    output.unlink(missing_ok=True)
    command = ["--backend", BACKENDS[row.endpoint], "--base-url", url]
    command += ["--endpoint", PATHS[row.endpoint], "--model", target.model, "--tokenizer", tokenizer]
    command += ["--dataset-name", "custom", "--dataset-path", str(data), "--custom-output-len", "-1"]
    command += ["--skip-chat-template", "--disable-shuffle", "--num-prompts", str(len(requests)), "--ignore-eos"]
    command += ["--max-concurrency", str(row.in_flight)] if row.in_flight else []
    command += ["--request-rate", str(row.rate)] if row.rate else []
    command += ["--extra-body", '{"temperature": 0.7}', "--disable-tqdm", "--seed", "0"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", output.name]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if target.api_key:
        environment["OPENAI_API_KEY"] = target.api_key  # not an argument: others can read those
    log.unlink(missing_ok=True)
    code = generator.run(command, environment, log)
    if code or not output.exists():
        raise DriveError(_ended(code, log))
    raw = json.loads(output.read_text())
    first, between = times(folder)
    errors = collections.Counter(_one_line(error) for error in raw["errors"] if error)
    spent = raw["duration"]
    # A stream's end: its first token and all gaps after it.
    ends = [t + sum(gaps) for t, gaps, error in zip(raw["ttfts"], raw["itls"], raw["errors"], strict=True) if not error]
    return {
        "requests": len(requests),
        "completed": raw["completed"],
        "errors": dict(errors.most_common(5)),
        "duration_s": spent,
        "requests_per_s": raw["completed"] / spent,
        "prompt_tokens": raw["total_input_tokens"],
        "generation_tokens": raw["total_output_tokens"],
        "generation_tokens_per_s": raw["total_output_tokens"] / spent,
        "tokens_per_event": _tokens_per_event(raw, len(first), len(between)),
        "ttft_ms": quantiles_ms(first),
        "itl_ms": quantiles_ms(between),
        "e2e_ms": quantiles_ms(ends),
    }


def times(folder: Path) -> tuple[list[float], list[float]]:
    """Answered streams' times to first token, and all times between tokens, s, of the last streamed measurement."""
    raw = json.loads((folder / "bench.json").read_text())
    first = [ttft for ttft, error in zip(raw["ttfts"], raw["errors"], strict=True) if not error]
    return first, [gap for gaps in raw["itls"] for gap in gaps]


def _tokens_per_event(raw: Mapping[str, Any], streams: int, gaps: int) -> float | None:
    """Of the events after each stream's first, which holds one token; None where none came."""
    return max(1.0, (raw["total_output_tokens"] - streams) / gaps) if gaps else None


def _ended(code: int, log: Path) -> str:
    """How the load generator failed, in one line: the signal that ended it, or its own last words."""
    if code > 128:
        killed = f"vllm bench serve was killed by signal {code - 128}"
        return f"{killed}, as the kernel does when memory is short" if code == 128 + signal.SIGKILL else killed
    said = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"vllm bench serve ended with code {code}: {said[-1] if said else 'without a word'}"


async def _whole(row: Row, requests: Sequence[Request], target: Target, url: str) -> dict[str, Any]:
    pending = iter(requests)
    times: list[float] = []
    errors: collections.Counter[str] = collections.Counter()
    tokens = {"prompt_tokens": 0, "completion_tokens": 0}
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}

    async def client(session: aiohttp.ClientSession) -> None:
        for request in pending:
            body = {"model": target.model, "prompt": request.prompt, "max_tokens": request.output_tokens}
            begin = time.perf_counter()
            try:
                async with session.post(
                    f"{url}{PATHS[row.endpoint]}", json={**body, "ignore_eos": True, "temperature": 0.7}
                ) as answer:
                    read = await answer.json(content_type=None)
                    if answer.status != 200:
                        errors[_one_line(f"{answer.status}: {json.dumps(read)}")] += 1
                        continue
            except (aiohttp.ClientError, ValueError) as error:
                errors[_one_line(f"{type(error).__name__}: {error}")] += 1
                continue
            times.append(time.perf_counter() - begin)
            for name in tokens:
                tokens[name] += read["usage"][name]

    begin = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=600)
    ) as session:
        await asyncio.gather(*(client(session) for _ in range(row.in_flight or 1)))
    spent = time.perf_counter() - begin
    return {
        "requests": len(requests),
        "completed": len(times),
        "errors": dict(errors.most_common(5)),
        "duration_s": spent,
        "requests_per_s": len(times) / spent,
        "prompt_tokens": tokens["prompt_tokens"],
        "generation_tokens": tokens["completion_tokens"],
        "generation_tokens_per_s": tokens["completion_tokens"] / spent,
        "tokens_per_event": None,
        "ttft_ms": None,
        "itl_ms": None,
        "e2e_ms": quantiles_ms(times),
    }


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:200] if lines else text
