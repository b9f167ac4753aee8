"""What is known about the stack over one window of time. Values only; readings.py makes them, advice.py judges them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Counts = Mapping[str, float]
FULL = 0.9  # of the KV pool: beyond it a waiting request waits for blocks


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine. None: it does not say. `_mean`, `_max`: over the window's readings; counts are what was gained."""

    name: str  # host:port
    seen: bool = True  # its page could be read at the window's end
    stats: bool = True  # the page has vLLM's series
    ready: bool | None = None  # as the gateway sees it
    drained: bool = False  # by an order, whatever state it is in
    stalled_s: float = 0.0  # without progress though there was work
    running_mean: float = 0.0  # requests
    running_max: float = 0.0
    waiting_mean: float = 0.0
    pressed_share: float = 0.0  # of the readings: something waited while the KV pool was FULL
    held_share: float = 0.0  # of the readings: something waited though the pool had room
    usage_mean: float | None = None  # share of the KV pool held by running requests
    usage_max: float | None = None
    preemptions: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    requests: float = 0.0  # finished
    queries: float | None = None  # prefix cache, tokens
    hits: float | None = None
    api_cores: float | None = None  # processor time of the API server's process, in cores; it has one interpreter lock
    restarted: bool = False  # within the window
    block_size: int | None = None  # tokens
    pool_tokens: int | None = None
    pool_bytes: int | None = None  # where it was set outright
    cache_dtype: str | None = None
    utilization: float | None = None
    prefix_caching: bool | None = None
    blocks_override: int | None = None

    @property
    def request_tokens(self) -> float | None:
        """Mean tokens (prompt and answer) of a finished request."""
        return (self.prompt_tokens + self.generation_tokens) / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """Ours. Counts are what was gained in the window."""

    requests: Counts = field(default_factory=dict)  # by tenant, refused ones included
    tokens: Counts = field(default_factory=dict)  # by tenant, prompt and generation
    shed: Counts = field(default_factory=dict)  # by cause
    shed_of: Counts = field(default_factory=dict)  # by tenant
    deadline_shed: float = 0.0
    queue_waits: float = 0.0  # admitted requests, and the seconds they waited
    queue_wait_s: float = 0.0
    queued_mean: float = 0.0  # requests
    queued_max: float = 0.0
    in_flight_max: float = 0.0  # requests
    in_flight_tokens_max: float = 0.0
    capacity_tokens: float = 0.0
    window_waits: float = 0.0  # requests that waited for company, and the seconds they waited
    window_wait_s: float = 0.0
    merged: float = 0.0
    streams: float = 0.0  # streamed answers that began
    prefix: Mapping[str, Counts] = field(default_factory=dict)  # tenant -> outcome -> prompt tokens
    settings: Counts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """`seconds`: how long the window is. `gateway` None: its figures could not be had."""

    seconds: float
    gateway: GatewayFacts | None
    engines: tuple[EngineFacts, ...]
