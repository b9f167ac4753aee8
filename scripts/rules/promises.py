"""configs/slo.yaml, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.metrics import Metrics
from gateway.wording import expectation

PATH = Path("configs/slo.yaml")
Share = Annotated[float, Field(gt=0, lt=1)]


class PromisesError(Exception):
    """slo.yaml can't be used; the message names the key."""


class Latency(BaseModel):
    """`limit_s` seconds, kept by `share` of what is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit_s: float = Field(gt=0)
    share: Share


class Promises(BaseModel):
    """The service level objectives."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    availability: Share
    minimum_requests: int = Field(ge=1)
    ttft: Latency
    itl: Latency
    prefix_hit_ratio: Share
    runbooks: str

    @model_validator(mode="after")
    def _limits_are_edges(self) -> Self:
        """A histogram knows how many lay below its buckets' edges, and nothing in between."""
        metrics = Metrics()
        for key, limit_s, histogram in (
            ("ttft", self.ttft.limit_s, metrics.ttft_seconds.labels("any")),
            ("itl", self.itl.limit_s, metrics.itl_seconds),
        ):
            edges = [edge for edge in histogram._upper_bounds if edge != float("inf")]
            if limit_s not in edges:
                known = ", ".join(f"{edge:g}" for edge in edges)
                raise ValueError(f"{key}.limit_s is {limit_s:g}, expected one of the histogram's edges: {known}")
        return self

    def values(self) -> dict[str, str]:
        """What stands for @name@ in the rules' expressions and words."""
        return {
            "availability": f"{self.availability * 100:g} %",
            "error_budget": f"{1 - self.availability:.6g}",
            # 2 % of a month's budget within an hour; 5 % within six.
            "fast_burn": f"{14.4 * (1 - self.availability):.6g}",
            "steady_burn": f"{6 * (1 - self.availability):.6g}",
            "minimum_requests": str(self.minimum_requests),
            "ttft_le": str(float(self.ttft.limit_s)),  # as the exposition writes it: 2.0, not 2
            "ttft_s": f"{self.ttft.limit_s:g}",
            "ttft_share": f"{self.ttft.share:g}",
            "ttft_percent": f"{self.ttft.share * 100:g} %",
            "itl_le": str(float(self.itl.limit_s)),
            "itl_s": f"{self.itl.limit_s:g}",
            "itl_share": f"{self.itl.share:g}",
            "itl_percent": f"{self.itl.share * 100:g} %",
            "prefix_hit_ratio": f"{self.prefix_hit_ratio:g}",
            "prefix_hit_percent": f"{self.prefix_hit_ratio * 100:g} %",
        }


def load(path: Path = PATH) -> Promises:
    """Raises PromisesError."""
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PromisesError(f"{path} can't be read: {str(error).splitlines()[0]}") from None
    try:
        return Promises.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PromisesError(f"{path}: {where + ': ' if where else ''}{expectation(first)}") from None
