"""What an engine that was just started is asked before clients reach it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripts._compose import ROOT
from scripts._running import Stack
from scripts.engine_args.vocabulary import PINNED
from scripts.engine_args.vocabulary import load as load_release

# Who reads the engine's series: the gateway's admission and health, the rules, the dashboards.
READERS = ("gateway/engine_metrics.py", "configs/prometheus", "grafana/dashboards")
_NAME = re.compile(r"vllm:[a-z][a-z0-9_]*")
_PART_OF = re.compile(r"_(?:bucket|sum|count)$")


def smoke_chat(stack: Stack) -> str | None:
    """One short chat (a completion, where the model has no chat template) straight to the engine; what is wrong."""
    status, text = stack.ask("engine", "GET", "/v1/models")
    try:
        model = json.loads(text)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        return f"its /v1/models answered {status} and no list of models: {text[:200]}"
    asked = {"model": model, "max_tokens": 16, "temperature": 0}
    chat = {**asked, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    status, text = stack.ask("engine", "POST", "/v1/chat/completions", chat, timeout_s=120)
    if status == 400 and "chat template" in text:
        status, text = stack.ask("engine", "POST", "/v1/completions", {**asked, "prompt": "Paris is"}, timeout_s=120)
    if status != 200:
        return f"a chat was answered {status}: {text[:300]}"
    try:
        choice = json.loads(text)["choices"][0]
        answer = choice["message"]["content"] if "message" in choice else choice["text"]
    except (ValueError, LookupError, TypeError):
        return f"a chat's answer can't be read: {text[:300]}"
    return None if str(answer or "").strip() else "a chat's answer is empty"


def metric_names(page: str) -> set[str]:
    """The names on an engine's /metrics, of families without a sample too."""
    names = {line.split(" ")[2] for line in page.splitlines() if line.startswith("# TYPE ")}
    return names | {re.split(r"[{ ]", line, maxsplit=1)[0] for line in page.splitlines() if line[:1] not in ("#", "")}


def needed_metrics(root: Path = ROOT) -> frozenset[str]:
    """The series that somebody here reads and the pinned engine has; names of older releases in an `or` are not."""
    paths = [root / name for name in READERS]
    files = [path for top in paths for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file()]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files if "__pycache__" not in path.parts)
    pinned = load_release(PINNED)
    return frozenset(name for text in texts for name in _NAME.findall(text) if pinned.has_metric(name))


def missing_metrics(stack: Stack, needed: frozenset[str]) -> str | None:
    """Which of the needed series the engine does not have."""
    status, page = stack.ask("engine", "GET", "/metrics")
    if status != 200:
        return f"its /metrics answered {status}"
    has = metric_names(page)
    absent = sorted(name for name in needed if name not in has and _PART_OF.sub("", name) not in has)
    return f"its /metrics lacks what rules, dashboards or gateway read: {', '.join(absent)}" if absent else None
