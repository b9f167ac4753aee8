"""The requests of a proof, and what is read off the engine around them. The only part that talks to it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from scripts.checks.proof import ProofError
from scripts.checks.proof.judge import Held, Pair, Sent
from scripts.checks.proof.scrape import Scrape, parse_scrape

REQUEST_S = 300  # 2048 tokens on two CPU cores take ten
RETURN_S = 10
SOME_TEXT = (
    "The harbour lay quiet under a pale morning sky while boats came back from the night. People on the pier counted "
    "boxes of fish, paid in small coins, and argued about the weather, the price of ice, and who would repair the net."
)


@dataclass(frozen=True)
class Model:
    """root: where the engine loaded it from, a path or a hub name. max_model_len: None where it does not say."""

    name: str
    root: str
    max_model_len: int | None


@dataclass(frozen=True)
class Front:
    """Where requests go: the engine itself, or a gateway before it."""

    url: str
    headers: Mapping[str, str]


def front_at(url: str, key: str | None) -> Front:
    return Front(url.rstrip("/").removesuffix("/v1"), {"Authorization": f"Bearer {key}"} if key else {})


class Target:
    """One engine, and what it says of itself."""

    def __init__(self, engine: str, client: httpx.Client, rng: random.Random, key: str | None = None) -> None:
        self._front = front_at(engine.rstrip("/").removesuffix("/metrics"), key)
        self.base, self._headers = self._front.url, self._front.headers
        self._client = client
        self._rng = rng
        self.ids: Sequence[int] = ()

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(self.base + path, headers=self._headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProofError(f"no engine answers at {self.base}{path}: {error or type(error).__name__}") from None

    def healthy(self) -> None:
        """Raises ProofError for an engine that is down or dead."""
        answer = self._get("/health")
        if answer.status_code != httpx.codes.OK:
            if self._is_gateway():
                raise ProofError(
                    f"{self.base} is the gateway: name the engine's own address, make verify "
                    "ENGINE=http://127.0.0.1:8000 (ARGS='--gateway URL' looks at the gateway as well)"
                )
            raise ProofError(
                f"{self.base}/health answered {answer.status_code}: not a live engine (a vLLM answers 200)"
            )

    def _is_gateway(self) -> bool:
        """By its public address, which has /readyz, or by its admin address, which has its own series."""
        try:
            return self._get("/readyz").json()["status"] in ("ready", "unready")
        except (ValueError, KeyError, TypeError):
            return "\ngateway_" in self._get("/metrics").text

    def scrape(self) -> Scrape:
        answer = self._get("/metrics")
        if answer.status_code != httpx.codes.OK:
            raise ProofError(f"{self.base}/metrics answered {answer.status_code}: not an engine's address")
        return parse_scrape(answer.text, f"{self.base}/metrics")

    def version(self) -> str | None:
        answer = self._get("/version")
        try:
            return str(answer.json()["version"])
        except (ValueError, KeyError, TypeError):
            return None

    def model(self) -> Model:
        answer = self._get("/v1/models")
        if answer.status_code in (401, 403):
            raise ProofError(f"{self.base} wants its API key: set VLLM_API_KEY")
        try:
            entry = answer.json()["data"][0]
            length = entry.get("max_model_len")
            return Model(str(entry["id"]), str(entry.get("root") or ""), int(length) if length else None)
        except (ValueError, KeyError, IndexError, TypeError):
            raise ProofError(f"{self.base}/v1/models lists no model (status {answer.status_code})") from None

    def learn_ids(self, model: str) -> None:
        """Token ids of plain words, to build prompts of an exact length from; a small range where there is no route."""
        try:
            answer = self._client.post(
                f"{self.base}/tokenize", json={"model": model, "prompt": SOME_TEXT}, headers=self._headers
            )
            ids = sorted({int(token) for token in answer.json()["tokens"]})
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            ids = []
        self.ids = ids[1:] if len(ids) > 20 else range(1000, 8000)

    def fresh(self, length: int) -> list[int]:
        """A prompt nobody has sent before."""
        return [self._rng.choice(self.ids) for _ in range(length)]

    def send(
        self, model: str, prompt: list[int], answer_tokens: int, front: Front | None = None
    ) -> tuple[float, int | None]:
        """Streams one completion to its end: seconds to its first token, and the cached tokens its usage names."""
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        front = front or self._front
        url = f"{front.url}/v1/completions"
        started = time.perf_counter()
        first, cached = None, None
        try:
            with self._client.stream("POST", url, json=body, headers=front.headers, timeout=REQUEST_S) as response:
                if response.status_code != httpx.codes.OK:
                    said = " ".join(response.read().decode("utf-8", "replace").split())[:200]
                    raise ProofError(f"{url} answered {response.status_code}: {said}")
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    if first is None:
                        first = time.perf_counter() - started
                    details = ((json.loads(line[6:]).get("usage") or {}).get("prompt_tokens_details")) or {}
                    cached = details.get("cached_tokens", cached)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ProofError(f"{url} broke off: {error or type(error).__name__}") from None
        if first is None:
            raise ProofError(f"{url} streamed no token")
        return first, cached

    def pair(self, model: str, length: int, front: Front | None = None) -> Pair:
        prompt = self.fresh(length)
        return Pair(length, self._sent(model, prompt, front), self._sent(model, prompt, front))

    def _sent(self, model: str, prompt: list[int], front: Front | None) -> Sent:
        before = self.scrape()
        # Two tokens: V0 writes a step's figures with the next step.
        ttft_s, cached = self.send(model, prompt, 2, front)
        after = self.scrape()
        return Sent(
            _moved(before.queries, after.queries), _moved(before.hits, after.hits), after.hit_rate, ttft_s, cached
        )

    def hold(self, model: str, prompt_tokens: int, answer_tokens: int, blocks: int | None) -> Held:
        """One long fresh request, watched by scrapes while it runs. Without `blocks` the figures are shares."""
        scale = blocks or 1
        prompt = self.fresh(prompt_tokens)
        before = (self.scrape().usage or 0) * scale
        problem: list[Exception] = []

        def work() -> None:
            try:
                self.send(model, prompt, answer_tokens)
            except ProofError as error:
                problem.append(error)

        worker = threading.Thread(target=work, name="long request", daemon=True)
        worker.start()
        peak = before
        while worker.is_alive():
            peak = max(peak, (self.scrape().usage or 0) * scale)
            worker.join(0.01)
        if problem:
            raise problem[0]
        ended, returned = time.monotonic(), None
        while returned is None and time.monotonic() - ended < RETURN_S:
            after = (self.scrape().usage or 0) * scale
            # A share of 1e-9 is the float's, not a block's.
            if after <= before + 1e-6 * scale:
                returned = time.monotonic() - ended
            else:
                time.sleep(0.02)
        return Held(prompt_tokens, answer_tokens, before, peak, after, returned)


def _moved(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def prefix_length(block_size: int, max_model_len: int | None) -> int | None:
    """Tokens of a prompt for the pairs: about 512 and at least four blocks, and never a whole number of blocks.

    A prompt of whole blocks is the one length that releases count differently. None where the context holds no block.
    """
    room = (max_model_len or 1 << 30) - 2
    blocks = max(4, -(-512 // block_size))
    blocks = min(blocks, (room - 1) // block_size)
    if blocks < 1 or block_size < 2:
        return None
    return min(blocks * block_size + max(block_size // 2, 1), room) if blocks * block_size < room else None


def long_lengths(max_model_len: int | None) -> tuple[int, int]:
    """Prompt and answer of the long request: 2048 tokens together, or all the context holds."""
    total = min(2048, max_model_len or 2048)
    answer = max(min(64, total // 4), 1)
    return max(total - answer, 1), answer
