"""What an engine that was just started is asked before clients reach it."""

from __future__ import annotations

import json
import re

from scripts._running import Stack


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


def missing_metrics(stack: Stack, needed: frozenset[str]) -> str | None:
    """Which of the needed series the engine does not have."""
    status, page = stack.ask("engine", "GET", "/metrics")
    absent = sorted(needed - metric_names(page))
    if status != 200 or absent:
        return f"/metrics ({status}) lacks what the rules and the gateway read: {', '.join(absent)}"
    return None
