"""Choose a replica. Pure: a snapshot goes in, an index comes out.

Cases, in order:

1. no candidate: None, and the caller decides between waiting and 503.
2. no affinity key: the replica with the least in-flight tokens relative to its capacity.
3. an affinity key (the leading part of the prompt): the replica that rendezvous hashing gives it: a conversation
   comes back to the KV cache blocks it left behind; unless that one is so loaded that the cache would not pay for the
   wait, then the next in the key's own order.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

# The preferred replica is left when it holds this many times the mean load: bounded-load rendezvous.
LOAD_BOUND = 1.25


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
    weights = sum(candidate.weight for candidate in candidates)
    order = sorted(range(len(candidates)), key=lambda i: rank(key, candidates[i].name), reverse=True)
    for i in order:
        candidate = candidates[i]
        if candidate.in_flight < LOAD_BOUND * total * candidate.weight / weights:
            return i
    return order[0]


def rank(key: bytes, name: str) -> bytes:
    """A key's preference for a replica: higher is better, and independent of which other replicas exist."""
    return hashlib.blake2b(key, digest_size=8, person=hashlib.blake2b(name.encode(), digest_size=16).digest()).digest()
