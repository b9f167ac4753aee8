"""One row of the answer."""

import re
from dataclasses import dataclass, field
from typing import Any

from scripts.flags.truth import CHANGE, Say, Verdict

# Names whose values are never shown or written: VLLM_API_KEY, HF_TOKEN, --api-key, but not --num-speculative-tokens.
SECRET = re.compile(r"(?:^|[-_])(?:api[-_]?key|key|access[-_]key[-_]id|token|secret|password)$", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One row of the answer. `gone_in` is the release a removed thing was first missing from."""

    kind: str  # program, trap, flag, docker, variable, metric, claim
    subject: Say
    verdict: Verdict
    why: Say
    write: Say | None = None
    effect: Say | None = None
    evidence: str = ""
    hardware: Say | None = None  # where the effect was measured
    line: int = 0
    gone_in: str | None = None
    entry: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # what it puts into the profile
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def change(self) -> bool:
        """Whether the author has something to change."""
        return self.verdict in CHANGE
