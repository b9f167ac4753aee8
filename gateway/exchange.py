"""One request's record, filled in on its way and counted once when it ends; and the shape of a whole answer."""

from dataclasses import dataclass, field

from gateway.keys import ANONYMOUS, OTHER, Tenant


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer, ready to send."""

    status: int
    body: bytes
    content_type: str = "application/json"
    retry_after: str | None = None
    usage: tuple[int, int] | None = None  # prompt and generation tokens
    cached_tokens: int | None = None  # of the prompt, where the engine tells
    no_route: bool = False  # the engine has no such route, and says no more than that


@dataclass(slots=True)
class Exchange:
    """Mutable; owned by the task that serves the request. Times are seconds of the gateway's monotonic clock."""

    request_id: str  # what the client sees: its own X-Request-Id where it sent a fit one
    upstream_id: str  # what engines see: unique, whatever clients send
    arrived_s: float
    route: str  # a known path or "other": bounded, so it may be a label
    tenant: Tenant | None = None
    model: str = ""
    replica: str = ""
    status: int = 0
    answered_s: float | None = None  # response headers sent
    first_token_s: float | None = None
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, where the engine tells
    phase: str = "reading"  # reading, queued, waiting, streaming: where a leaving client was
    failure: str = ""  # cause label of an upstream failure
    refused: bool = False  # by admission, a key's limits, or for want of an engine
    trace: dict[str, str] = field(default_factory=dict)  # trace context headers for the engine

    @property
    def tenant_label(self) -> str:
        return OTHER if self.tenant is None else self.tenant.name

    @property
    def owner(self) -> Tenant:
        return self.tenant or ANONYMOUS
