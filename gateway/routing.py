"""Choose a replica. Pure: a snapshot goes in, an index comes out.

Cases, in order:

1. no candidate: None, and the caller decides between waiting and 503.
2. no affinity key: the replica with the least in-flight tokens relative to its capacity.
3. an affinity key (the leading part of the prompt): the replica that rendezvous hashing gives it: a conversation
   comes back to the KV cache blocks it left behind; unless that one is so loaded that the cache would not pay for the
   wait, then the next in the key's own order.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

# The preferred replica is left when it holds this many times the mean load: bounded-load rendezvous.
LOAD_BOUND = 1.25
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One ready replica as routing sees it."""

    name: str
    in_flight: int  # requests of ours
    weight: float = 1.0  # relative capacity


def choose(candidates: Sequence[Candidate], key: bytes | None = None) -> int | None:
    """Index of the chosen candidate, None if there is none. O(len(candidates))."""
    if not candidates:
        return None
    if len(candidates) == 1:
        return 0
    if key is None:
        return min(range(len(candidates)), key=lambda i: (candidates[i].in_flight + 1) / candidates[i].weight)
    total = sum(candidate.in_flight for candidate in candidates) + 1
    bound = LOAD_BOUND * total / sum(candidate.weight for candidate in candidates)
    point = _digest(key)
    ranks = [_mix(point ^ _name_digest(candidate.name)) for candidate in candidates]
    within = [i for i, candidate in enumerate(candidates) if candidate.in_flight < bound * candidate.weight]
    return max(within or range(len(candidates)), key=ranks.__getitem__)


def rank(key: bytes, name: str) -> int:
    """A key's preference for a replica: higher is better, and independent of which other replicas exist."""
    return _mix(_digest(key) ^ _name_digest(name))


def _mix(value: int) -> int:
    """One round of SplitMix64's finalizer (Steele, Lea, Flood 2014): the bare xor of two digests orders badly."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return value ^ (value >> 27)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


@functools.lru_cache(maxsize=4096)
def _name_digest(name: str) -> int:
    return _digest(name.encode())
