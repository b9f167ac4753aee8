"""One engine as the gateway knows it: its state, its models, its capacity, our requests in flight. No I/O.

A replica is in one state:

- `down`: /health does not answer 200, or a connection was refused.
- `warming`: /health answers, but no token has been generated for us yet (loading, compiling).
- `ready`: it answered a one-token request, and has made progress since whenever it had work.
- `hung`: it had work and made no progress for stall_s, whatever /health says. Ready again once it moves.
- `draining`: it finishes what it has and gets nothing new.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.breaker import Breaker
from gateway.progress import ForwardProgress

MOST_MODELS = 1000  # that one engine may serve, adapters included
MOST_NAME_CHARS = 500  # of a model: names are metric labels, and stand in answers


class State(enum.StrEnum):
    DOWN = enum.auto()
    WARMING = enum.auto()
    READY = enum.auto()
    HUNG = enum.auto()
    DRAINING = enum.auto()


@dataclass(slots=True, eq=False)
class Replica:
    """One addressable engine. The request path counts `in_flight` up and down and tells the breaker what came of its
    calls; the rest is its monitor's and Replicas'."""

    url: str
    progress: ForwardProgress
    breaker: Breaker
    joined_s: float = 0.0
    state: State = State.DOWN
    reason: str = "not looked at yet"
    was_ready: bool = False
    models: dict[str, int | None] = field(default_factory=dict)  # served model name -> max_model_len (tokens)
    embeds: bool | None = None  # it embeds and completes nothing; None: not known yet
    capacity_tokens: int | None = None
    weight: float = 1.0  # relative capacity, for routing
    block_size: int | None = None  # tokens
    prefix_caching: bool = False
    starts: int = 0  # of the engine, as far as we saw: what it had cached before is gone
    started_s: float | None = None
    page: str = ""  # its last /metrics
    in_flight: int = 0
    missed_looks: int = 0  # in a row, by silence
    looks: int = 0  # since its models were read
    drain_requested: bool = False
    listed: bool = True  # False: no source names it any more; it is forgotten once it has nothing of ours

    def __repr__(self) -> str:
        return f"<Replica {self.url} {self.state}, {self.in_flight} in-flight>"

    @property
    def drains(self) -> bool:
        return self.drain_requested or not self.listed


def served_models(body: bytes) -> dict[str, int | None] | None:
    """Model name -> max_model_len (tokens) from an engine's /v1/models; None where the body is no such list, names a
    model at more than MOST_NAME_CHARS, or tells a length that can't be."""
    try:
        listed = orjson.loads(body)["data"]
        models = {model["id"]: model.get("max_model_len") for model in listed}
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    if not all(isinstance(name, str) and _can_be(length) for name, length in models.items()):
        return None
    if any(len(name) > MOST_NAME_CHARS for name in models):
        return None
    return models


def _can_be(length: Any) -> bool:
    """A length of 0 or less would make requests cost less than nothing."""
    return length is None or (type(length) is int and length > 0)
