"""What one engine says of texts and chats, over HTTP: token ids, log probabilities, answers, speed, KV room."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from scripts.quantization.figures import Position
from scripts.quantization.gate import Answer
from scripts.quantization.gate_config import Chat, GateConfig

NAME = "gate"  # what both sides are served as
_TIMEOUT_S = 300


class ScoringError(Exception):
    """The engine did not answer as it should; the message is one line."""


@dataclass(frozen=True)
class Scored:
    """A window: its first token, which nothing predicts, and a position for each of the rest."""

    first: int
    rest: tuple[Position, ...]

    @property
    def tokens(self) -> list[int]:
        return [self.first, *(position.token for position in self.rest)]


@dataclass(frozen=True)
class Rate:
    """Generated tokens a second: one request alone, several at once."""

    alone: float
    together: float


@dataclass(frozen=True)
class Scores:
    """One side. texts, templates: token ids, as this side's tokenizer and chat template make them."""

    texts: tuple[tuple[int, ...], ...]
    templates: tuple[tuple[int, ...], ...]
    windows: tuple[Scored, ...]
    answers: tuple[Answer, ...]
    rate: Rate
    kv_tokens: int | None
    engine: str
    seconds: float


def cut(texts: Sequence[Sequence[int]], window: int, most: int) -> list[list[int]]:
    """Windows of at most `window` tokens, `most` in all. A window of one token predicts nothing and is left out."""
    found: list[list[int]] = []
    left = most
    for ids in texts:
        for begin in range(0, len(ids), window):
            piece = list(ids[begin : begin + min(window, left)])
            if len(piece) > 1:
                found.append(piece)
                left -= len(piece)
            if left < 2:
                return found
    return found


class Scorer:
    """Talks to one engine. Raises ScoringError."""

    def __init__(self, url: str, config: GateConfig) -> None:
        self._config = config
        # Not the machine's proxy: the engine is here. One connection per request at once is enough.
        self._http = httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def score(
        self, texts: Sequence[str], windows: Sequence[Sequence[int]] | None, say: Callable[[str], None]
    ) -> Scores:
        """`windows` None: cut from this side's own token ids, which makes it the side that the other is scored like."""
        began = time.monotonic()
        config = self._config
        ids = [self._tokenize(prompt=text, add_special_tokens=False) for text in texts]
        chosen = cut(ids, config.text.window_tokens, config.text.max_tokens) if windows is None else windows
        total = sum(map(len, chosen))
        scored: list[Scored] = []
        done = 0
        for window in chosen:
            scored.append(self._window(window))
            done += len(window)
            say(f"scored {done} of {total} tokens")
        say("chats")
        answers = tuple(self._chat(chat) for chat in config.chats)
        templates = tuple(self._tokenize(messages=_messages(chat)) for chat in config.chats)
        say("speed")
        rate = self._rate()
        return Scores(
            tuple(ids),
            templates,
            tuple(scored),
            answers,
            rate,
            self._kv_tokens(),
            self._version(),
            time.monotonic() - began,
        )

    def chat(self, chat: Chat) -> Answer:
        return self._chat(chat)

    def _window(self, ids: Sequence[int]) -> Scored:
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._config.text.listed}
        listed = self._post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        if not isinstance(listed, list) or len(listed) != len(ids):
            raise ScoringError("the engine sent no prompt_logprobs for the prompt's tokens")
        return Scored(ids[0], tuple(position(token, found) for token, found in zip(ids[1:], listed[1:], strict=True)))

    def _chat(self, chat: Chat) -> Answer:
        body = {"messages": _messages(chat), "max_tokens": self._config.chat_tokens, "temperature": 0}
        choice = self._post("/v1/chat/completions", body)["choices"][0]
        return Answer(choice["message"]["content"] or "", str(choice["finish_reason"]))

    def _tokenize(self, **fields: Any) -> tuple[int, ...]:
        return tuple(self._post("/tokenize", fields)["tokens"])

    def _rate(self) -> Rate:
        speed = self._config.speed
        return Rate(
            *(statistics.median(self._tokens_per_s(n) for _ in range(speed.repeats)) for n in (1, speed.together))
        )

    def _tokens_per_s(self, together: int) -> float:
        """Prompts differ, or the prefix cache would serve the later ones."""
        tokens = self._config.speed.tokens

        def one(index: int) -> int:
            body = {"prompt": f"{index}. Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return int(self._post("/v1/completions", body)["usage"]["completion_tokens"])

        with ThreadPoolExecutor(together) as pool:
            began = time.monotonic()
            generated = sum(pool.map(one, range(together)))
            return generated / (time.monotonic() - began)

    def _version(self) -> str:
        try:
            return str(orjson.loads(self._get("/version"))["version"])
        except (ValueError, LookupError, TypeError):
            return "unknown"

    def _get(self, path: str) -> str:
        try:
            return self._http.get(path).text
        except httpx.HTTPError as error:
            raise ScoringError(f"{path}: {error or type(error).__name__}") from error

    def _kv_tokens(self) -> int | None:
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                if sample.name == "vllm:cache_config_info":
                    size = sample.labels.get("kv_cache_size_tokens", "")
                    return int(size) if size.isdigit() else None
        return None

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            answer = self._http.post(path, json={"model": NAME, **body})
        except httpx.HTTPError as error:
            raise ScoringError(f"{path}: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise ScoringError(f"{path}: HTTP {answer.status_code}: {answer.text[:300]}")
        return orjson.loads(answer.content)


def position(token: int, found: dict[str, dict[str, Any]]) -> Position:
    """From one entry of prompt_logprobs: {"<id>": {"logprob": ..}}, the prompt's own token always among them."""
    listed = {int(name): float(entry["logprob"]) for name, entry in found.items()}
    return Position(token, listed[token], listed)


def difference(original: Scores, artifact: Scores) -> str | None:
    """How the sides' token ids differ, for people; None where they are the same everywhere."""
    for what, left, right in (
        ("text", original.texts, artifact.texts),
        ("chat", original.templates, artifact.templates),
    ):
        differing = [index for index, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
        if differing:
            a, b = left[differing[0]], right[differing[0]]
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            first, second = (repr(ids[at]) if at < len(ids) else "the end" for ids in (a, b))
            return f"{len(differing)} of {len(left)} {what}s become other tokens (first: {second} for {first})"
    return None


def _messages(chat: Chat) -> list[dict[str, str]]:
    return [{"role": "user", "content": chat.ask}]
