"""What the demo shows: progress while things start, one conversation, and the numbers Prometheus has for it."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
from openai.types.chat import ChatCompletionMessageParam

from scripts import _prometheus

QUESTIONS = (
    "What is the capital of France?",
    "And what is it famous for? Answer in one sentence.",
)
MAX_TOKENS = 120
_RATIO = "sum(vllm:prefix_cache_hits_total) / sum(vllm:prefix_cache_queries_total)"
_USAGE = "max(max_over_time(vllm:kv_cache_usage_perc[1m]))"


class TalkError(Exception):
    """The demo did not get what it was to show; the message is one line."""


class StoppedError(Exception):
    """Somebody ended the demo while it waited."""


class Terminal:
    """Lines with the seconds since the start; on a terminal also one that is rewritten while something is awaited."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._live = sys.stdout.isatty()
        self._said = ("", 0.0)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    def line(self, text: str = "") -> None:
        """A line that stays."""
        self._clear()
        print(f"{self.seconds:6.1f} s  {text}" if text else "", flush=True)

    def plain(self, text: str = "") -> None:
        """A line without seconds."""
        self._clear()
        print(text, flush=True)

    def waiting(self, text: str) -> None:
        """What is awaited now: rewritten in place; where that can't be, a line when it changes and every 10 s."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{f'{self.seconds:6.1f} s  … {text}'[:width]}", end="", flush=True)
        elif text != self._said[0] or self.seconds - self._said[1] > 10:
            self._said = (text, self.seconds)
            self.line(f"… {text}")

    def stream(self, pieces: Iterator[str]) -> str:
        """Prints an answer as it comes, wrapped between words where there is a width; returns it as it came."""
        indent = " " * 9
        width = shutil.get_terminal_size().columns - 1 if self._live else 1 << 30
        parts = []
        column = len(indent)
        print("  model  ", end="", flush=True)
        for piece in pieces:
            parts.append(piece)
            if piece.startswith(" ") and column + len(piece) > width:
                piece = "\n" + piece[1:]  # what is printed, not what came
            print(piece.replace("\n", "\n" + indent), end="", flush=True)
            column = len(indent) + len(piece.rpartition("\n")[2]) if "\n" in piece else column + len(piece)
        print(flush=True)
        return "".join(parts)

    def _clear(self) -> None:
        if self._live:
            print("\r\033[K", end="")


def wait(ready: Callable[[], str | None], terminal: Terminal, ended: threading.Event, limit_s: float) -> None:
    """Polls until `ready` returns None; a string is what is still awaited. Raises StoppedError, TalkError."""
    until = time.monotonic() + limit_s
    while (awaited := ready()) is not None:
        terminal.waiting(awaited)
        if time.monotonic() > until:
            raise TalkError(f"not ready after {limit_s:.0f} s: {awaited}")
        if ended.wait(0.25):
            raise StoppedError


def answers(client: httpx.Client, url: str) -> tuple[bool, str]:
    """Whether the URL answers 200, and what it says instead."""
    try:
        response = client.get(url)
    except httpx.HTTPError:
        return False, ""
    if response.status_code == 200:
        return True, ""
    try:
        return False, str(response.json()["reason"])
    except (ValueError, KeyError, TypeError):
        return False, f"HTTP {response.status_code}"


@dataclass(frozen=True)
class Turn:
    """One answered question: times in seconds, tokens as the engine counted them."""

    text: str
    ttft_s: float
    tokens_per_s: float
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int


def converse(base_url: str, model: str, http: httpx.Client, terminal: Terminal, ended: threading.Event) -> list[Turn]:
    """Asks QUESTIONS as one conversation and prints the answers as they come. Raises TalkError, StoppedError."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, http_client=http)
    messages: list[ChatCompletionMessageParam] = []
    turns = []
    for question in QUESTIONS:
        terminal.plain(f"\n  you    {question}")
        messages.append({"role": "user", "content": question})
        try:
            turn = _ask(client, model, messages, terminal, ended)
        except openai.OpenAIError as error:
            raise TalkError(f"the chat failed: {error}") from error
        turns.append(turn)
        messages.append({"role": "assistant", "content": turn.text})
    return turns


def _ask(
    client: openai.OpenAI,
    model: str,
    messages: list[ChatCompletionMessageParam],
    terminal: Terminal,
    ended: threading.Event,
) -> Turn:
    started = time.monotonic()
    at: list[float] = []  # when each piece of text came
    usage = finish = None

    def pieces() -> Iterator[str]:
        nonlocal usage, finish
        with client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            for chunk in stream:
                if ended.is_set():
                    raise StoppedError
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    if choice.delta.content:
                        at.append(time.monotonic())
                        yield choice.delta.content

    text = terminal.stream(pieces())
    if not text.strip() or finish is None or usage is None:
        raise TalkError("the stream ended without a whole answer")
    details = usage.prompt_tokens_details
    return Turn(
        text=text,
        ttft_s=at[0] - started,
        tokens_per_s=(usage.completion_tokens - 1) / (at[-1] - at[0]) if len(at) > 1 else 0.0,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        generation_tokens=usage.completion_tokens,
    )


@dataclass(frozen=True)
class Numbers:
    """Read from Prometheus after the conversation: both are shares between 0 and 1."""

    prefix_hit_ratio: float
    kv_cache_usage: float


def numbers(client: httpx.Client, url: str, generated: int, terminal: Terminal, ended: threading.Event) -> Numbers:
    """Waits until Prometheus has scraped `generated` tokens, then asks it. Raises TalkError, StoppedError."""

    def scraped() -> str | None:
        try:
            seen = _prometheus.query(client, url, "sum(vllm:generation_tokens_total)")
        except httpx.HTTPError:
            seen = None
        return None if seen is not None and seen >= generated else "Prometheus's next scrape"

    wait(scraped, terminal, ended, limit_s=30)
    ratio, usage = _prometheus.query(client, url, _RATIO), _prometheus.query(client, url, _USAGE)
    if ratio is None or usage is None:
        raise TalkError("Prometheus scraped the engine, but has no prefix-cache or KV-cache figure")
    return Numbers(ratio, usage)


def show(turns: list[Turn], found: Numbers | None, terminal: Terminal) -> None:
    """The figures, a line each."""
    terminal.plain()
    for number, turn in enumerate(turns, 1):
        terminal.plain(
            f"  answer {number}          TTFT {turn.ttft_s * 1000:.0f} ms, {turn.tokens_per_s:.1f} tokens/s "
            f"({turn.prompt_tokens} prompt tokens, {turn.cached_tokens} of them cached; "
            f"{turn.generation_tokens} generated)"
        )
    if found is not None:
        terminal.plain(f"  prefix-cache hits {found.prefix_hit_ratio:.1%} of all prompt tokens (from Prometheus)")
        if found.kv_cache_usage >= 0.00005:  # else every scrape fell between two answers
            terminal.plain(f"  KV cache          {found.kv_cache_usage:.2%} in use at the peak (from Prometheus)")


def ending(base_url: str, model: str, stays: bool) -> str:
    """What can be done next. Addresses are shown only where something will still answer on them."""
    return recipes(base_url, model) if stays else "\n  make demo, without --once, stays up to be asked\n"


def recipes(base_url: str, model: str) -> str:
    """The lines to copy; nothing is indented, so that they can be pasted as they are."""
    return f"""
Ask it yourself, with curl:

curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' -d '
{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

or with openai-python:

.venv/bin/python -c '
from openai import OpenAI
client = OpenAI(base_url="{base_url}/v1", api_key="none")
answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
print(answer.choices[0].message.content)'
"""
