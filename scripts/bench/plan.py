"""What is measured: a plan of engine starts, each with its measurements, read from YAML (configs/bench).

A plan is data, so that the guide's ladder, the figures of one card and the smoke on a CPU are the same program.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.wording import expectation, meant

Workload = Literal["chat", "prefix", "short", "long", "mixed"]
Outcome = Literal["success", "failure"]


class PlanError(ValueError):
    """A plan that can't be used; the message names file, place and expectation."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Part):
    """One measurement, repeated; `in_flight` (closed loop) or `rate` (open loop, requests/s) says how it is sent."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    workload: Workload
    requests: int = Field(ge=1)
    in_flight: int | None = Field(None, ge=1)
    rate: float | None = Field(None, gt=0)
    through: Literal["engine", "gateway"] = "engine"
    endpoint: Literal["chat", "completions"] = "chat"
    stream: bool = True
    answer_tokens: int | None = Field(None, ge=1)  # default: the workload's own lengths
    repeats: int = Field(3, ge=1)
    expect: Outcome = "success"  # failure: meant to have no request answered

    @model_validator(mode="after")
    def _one_way_of_sending(self) -> Self:
        if self.in_flight is not None and self.rate is not None:
            raise ValueError("in_flight (closed loop) or rate (open loop), not both; neither sends all at once")
        if not self.stream and (self.endpoint != "completions" or self.in_flight is None):
            raise ValueError("stream: false needs endpoint: completions and in_flight: vllm bench serve only streams")
        return self


class Boot(_Part):
    """One start of an engine and what is measured on it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str = ""
    model: str | None = None  # default: the plan's
    profile: str | None = None  # a file of configs/engine, without .yaml: its arguments come first
    arguments: tuple[str, ...] = ()  # of `vllm serve`, after the model
    environment: dict[str, str] = Field(default_factory=dict)
    gateway: dict[str, str] = Field(default_factory=dict)  # settings of the gateway in front (GATEWAY__...)
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    expect: Outcome = "success"  # failure: meant not to come up; its rows are never measured

    def flagged(self) -> bool:
        """Whether it wants an engine, or a gateway, of its own, which a running one is not."""
        return bool(self.model or self.profile or self.arguments or self.environment or self.gateway)


class Ratio(_Part):
    """Requests/s of one measurement divided by another's, as `boot/row`."""

    name: str
    over: str
    under: str
    aim: float | None = None


class Plan(_Part):
    title: str
    model: str
    seed: int = 0
    environment: dict[str, str] = Field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # of every boot, before its own
    together: bool = False  # all engines are there at once, side by side on the card, and measured in turns
    boots: Annotated[tuple[Boot, ...], Field(min_length=1)]
    ratios: tuple[Ratio, ...] = ()
    ladder: tuple[str, ...] = ()  # boot/row, each compared with the one before

    @model_validator(mode="after")
    def _names(self) -> Self:
        keys = [f"{boot.name}/{row.name}" for boot in self.boots for row in boot.rows]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"measured twice under one name: {', '.join(twice)}")
        named = {f"ratio {ratio.name}": (ratio.over, ratio.under) for ratio in self.ratios} | {"ladder": self.ladder}
        for place, wanted in named.items():
            if missing := [key for key in wanted if key not in keys]:
                raise ValueError(f"{place}: {missing[0]} is not a measurement of this plan")
        return self

    def attached(self) -> Self:
        """What of it a running engine can be asked, which keeps the flags it has. Raises PlanError for nothing."""
        boots = tuple(boot for boot in self.boots if not boot.flagged())
        if not boots:
            raise PlanError("every step of this plan starts an engine with flags of its own: leave --engine out")
        keys = {f"{boot.name}/{row.name}" for boot in boots for row in boot.rows}
        ratios = tuple(ratio for ratio in self.ratios if {ratio.over, ratio.under} <= keys)
        ladder = tuple(key for key in self.ladder if key in keys)
        return self.model_copy(update={"boots": boots, "ratios": ratios, "ladder": ladder})

    def measurements(self) -> Iterator[tuple[Boot, Row, int]]:
        """Every (boot, row, repeat), in the order in which they are run.

        Repeats go round over the rows of a boot, or of all boots that are there together, and every second round goes
        backwards: what warms up, or drifts, must not always favour the same row.
        """
        for group in self.groups():
            rows = [(boot, row) for boot in group for row in boot.rows]
            for repeat in range(max(row.repeats for _, row in rows)):
                left = [(boot, row, repeat) for boot, row in rows if repeat < row.repeats]
                yield from reversed(left) if repeat % 2 else left

    def groups(self) -> tuple[tuple[Boot, ...], ...]:
        """Boots that are there at the same time."""
        return (self.boots,) if self.together else tuple((boot,) for boot in self.boots)


def load(path: Path) -> Plan:
    """Raises PlanError with one line."""
    try:
        return Plan.model_validate(yaml.safe_load(path.read_text()))
    except IsADirectoryError as error:
        raise PlanError(f"{path} is a directory; a plan is a file of configs/bench") from error
    except OSError as error:
        near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.yaml")], n=1, cutoff=0.7)
        hint = f"; did you mean {' or '.join(str(path.with_name(name)) for name in near)}?" if near else ""
        raise PlanError(f"{path}: {error.strerror}{hint}") from error
    except yaml.YAMLError as error:
        raise PlanError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the plan"
        raise PlanError(f"{path}: {place}: {_expected(first)}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is no text") from error


def _expected(error: Any) -> str:
    if error["type"] == "string_pattern_mismatch":
        return f"{error['input']!r}: expected small letters, digits, and . _ - between them"
    if error["type"] != "extra_forbidden":
        return expectation(error)
    depth = sum(isinstance(step, int) for step in error["loc"])
    known = ((Plan, Ratio) if error["loc"][0] == "ratios" else (Plan, Boot, Row))[depth].model_fields
    return f"{expectation(error)}{meant(str(error['loc'][-1]), known)}"
