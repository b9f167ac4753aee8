"""One engine, started, given the same little traffic as every other, and its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx

from scripts import _ports
from scripts.golden_scrapes.builds import BuildError

START_S = 240
SETTLE_S = 30
NAME = "smollm2-135m-instruct"
# Flags that every release since 0.8 has.
FLAGS = ("--served-model-name", NAME, "--max-model-len", "1024", "--enforce-eager", "--enable-prefix-caching")
# Longer than the CPU engine's largest default block, so that it hits in each release.
PREFIX = (
    "You answer travellers at a small harbour. The ferry to the island leaves at seven, at noon and at five; in winter "
    "the noon boat does not run. Tickets are sold in the red house beside the pier, and children under six go free. "
    "Dogs are welcome on deck, bicycles cost as a child does. When the wind is above force eight no boat leaves, and "
    "the captain says so on a board in front of the inn. The inn serves soup until nine, has four rooms, and its owner "
    "keeps the keys of the museum. The museum shows nets, lamps and the bell of a ship that sank in a storm. The "
    "lighthouse can be climbed on Sundays. Letters go with the noon boat. Be short, be kind, and say when you do not "
    "know."
)
QUESTIONS = ("When is the last boat?", "May I bring my dog?", "Who has the museum's keys?", "Is there soup at ten?")


def page(engine: Path, model: Path, env: Mapping[str, str], log: Path) -> str:
    """Starts the engine on a free port, talks to it, returns its /metrics once they stand still. Raises BuildError."""
    port = _ports.free_port()
    serve = (str(engine), "serve", str(model), "--host", _ports.HOST, "--port", str(port), *FLAGS)
    guard = (sys.executable, "-m", "scripts._guard", "--parent", str(os.getpid()), "--", *serve)
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    with log.open("wb") as sink:
        running = subprocess.Popen(guard, env={**inherited, **quiet, **env}, stdout=sink, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://{_ports.HOST}:{port}", timeout=120, trust_env=False) as client:
            _until(lambda: _healthy(client, running, log), "a healthy engine", START_S)
            generated = sum(_chat(client, question, stream) for question in QUESTIONS for stream in (False, True))
            pages = [""]

            def settled() -> bool:
                pages.append(client.get("/metrics").text)
                figures = [re.findall(r"^vllm:.*$", text, re.MULTILINE) for text in pages[-2:]]
                counted = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", pages[-1], re.MULTILINE)
                return figures[0] == figures[1] and counted is not None and float(counted[1]) >= generated

            _until(settled, f"{generated} generated tokens on its /metrics", SETTLE_S)
            return pages[-1]
    except httpx.HTTPError as error:
        raise BuildError(f"the engine broke off ({error}); the end of its log: {_end(log)}") from error
    finally:
        running.terminate()
        running.wait(30)


def _chat(client: httpx.Client, question: str, stream: bool) -> int:
    """One chat; returns the tokens it generated."""
    messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question}]
    body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json=body | ({"stream": True} if stream else {}))
    answer.raise_for_status()
    return 12


def _healthy(client: httpx.Client, running: subprocess.Popen[bytes], log: Path) -> bool:
    if running.poll() is not None:
        raise BuildError(f"the engine ended with {running.returncode}; the end of its log: {_end(log)}")
    try:
        return client.get("/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _until(condition: Callable[[], bool], what: str, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise BuildError(f"not seen within {limit_s} s: {what}")
        time.sleep(0.2)


def _end(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception)\b", line) and "HTTP/1.1" not in line]
    return " | ".join(line[:300] for line in (errors or lines)[-4:])
