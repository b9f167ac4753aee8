"""Choose a replica. Pure: a snapshot goes in, an index comes out.

Cases, in order:

1. no candidate: None, and the caller decides between waiting and 503.
2. no affinity key: the replica with the least in-flight requests relative to its capacity.
3. an affinity key (the leading part of the prompt): the replica that rendezvous hashing gives it: a conversation
   comes back to the KV cache blocks it left behind; unless that one is so loaded that the cache would not pay for the
   wait, then the next in the key's own order.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

# The preferred replica is left when it holds this many times the mean load: bounded-load rendezvous,
LOAD_BOUND = 1.25
# and more requests than this: an engine decodes so few together about as fast as one, and prefills none of them for it.
SPARE = 8
# Of a conversation, up to its first user message: long enough to tell system prompts apart, and the same in every turn.
AFFINITY_BYTES = 1024
# Of a bare text, which may grow from call to call at its end: what is shorter has next to nothing cached.
TEXT_AFFINITY_BYTES = 256
_MASK = (1 << 64) - 1


class Routable(Protocol):
    """One ready replica as routing sees it."""

    @property
    def url(self) -> str: ...

    @property
    def in_flight(self) -> int:
        """Requests of ours."""

    @property
    def weight(self) -> float:
        """Relative capacity."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A Routable by itself."""

    url: str
    in_flight: int
    weight: float = 1.0


def choose(candidates: Sequence[Routable], key: bytes | None = None) -> int | None:
    """Index of the chosen candidate, None if there is none. O(len(candidates))."""
    if len(candidates) < 2:
        return 0 if candidates else None
    if not key:
        return min(range(len(candidates)), key=lambda i: (candidates[i].in_flight + 1) / candidates[i].weight)
    total, weight = 1, 0.0
    for candidate in candidates:
        total += candidate.in_flight
        weight += candidate.weight
    bound = LOAD_BOUND * total / weight
    point = _digest(key)
    best, best_rank = 0, -1
    loaded, loaded_rank = 0, -1  # should all of them stand above the bound, which rounding alone could bring about
    for i, candidate in enumerate(candidates):
        value = point ^ _url_digest(candidate.url)  # `_mix`, written out: a call for each costs more than all the rest
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value ^= value >> 27
        if value > best_rank and (candidate.in_flight < SPARE or candidate.in_flight < bound * candidate.weight):
            best, best_rank = i, value
        if value > loaded_rank:
            loaded, loaded_rank = i, value
    return best if best_rank >= 0 else loaded


def rank(key: bytes, url: str) -> int:
    """A key's preference for a replica: higher is better, and independent of which other replicas exist."""
    return _mix(_digest(key) ^ _url_digest(url))


def affinity(document: Mapping[str, Any]) -> bytes:
    """What decides which replica a request prefers, from its body: the part that a conversation's turns, or requests
    with one system prompt longer than this, have in common; b"" where there is none."""
    parts = [document[name] for name in ("system", "instructions") if document.get(name)]
    messages = document.get("messages") or document.get("input")
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        for message in messages:
            parts.append(message)
            if not isinstance(message, dict) or message.get("role") == "user":
                break
        return orjson.dumps(parts)[:AFFINITY_BYTES]
    text = document.get("prompt") or messages
    if not text:
        return orjson.dumps(parts)[:AFFINITY_BYTES] if parts else b""
    return orjson.dumps([*parts, text])[:TEXT_AFFINITY_BYTES]


def _mix(value: int) -> int:
    """One round of SplitMix64's finalizer (Steele, Lea, Flood 2014): the bare xor of two digests orders badly."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return value ^ (value >> 27)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=4096)
def _url_digest(url: str) -> int:
    return _digest(url.encode())
