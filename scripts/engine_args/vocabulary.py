"""What one vLLM release understands: its flags, environment variables and metrics."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import orjson

DATA = Path(__file__).parent / "data"
PINNED = "0.32.0"  # docker/requirements/engine-cpu.txt pins the same

Origin = Literal["live parser", "source"]
Form = Literal["switch", "boolean", "value", "optional", "list"]


class UnknownReleaseError(LookupError):
    """A release that was not captured; the message lists the captured ones."""


@dataclass(frozen=True)
class Flag:
    """One flag of the server's command line.

    `form` says what may follow: nothing (switch), nothing but there is a --no- form (boolean), one value, at most
    one (optional), several (list). `choices` are enforced by the parser; `suggested` are known values of an open set.
    A default that only running the release would tell is "?".
    """

    names: tuple[str, ...]
    form: Form
    type: str | None = None
    choices: tuple[Any, ...] = ()
    suggested: tuple[str, ...] = ()
    default: Any = None
    negative: str | None = None
    deprecated: bool = False

    @property
    def name(self) -> str:
        """The long spelling."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])

    def as_json(self) -> dict[str, Any]:
        """The fields that say something; `from_json` is its inverse."""
        return {key: v for key, v in asdict(self).items() if v not in (None, (), []) and v is not False}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """A flag from `as_json` or from the live capture."""
        lists = {"names", "choices", "suggested"}
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in raw.items() if k in known}
        return cls(**values)


@dataclass(frozen=True)
class Metric:
    """A metric by its exported name (counters with _total); a histogram's series add _bucket, _sum and _count."""

    name: str
    kind: str


@dataclass(frozen=True)
class Engine:
    """One captured release. `programs` are what can be started: "vllm serve", "vllm.entrypoints.…" for python -m."""

    version: str
    origin: Origin
    flags: tuple[Flag, ...]
    env: tuple[str, ...]
    metrics: tuple[Metric, ...]
    programs: tuple[str, ...]
    _spellings: dict[str, Flag] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for flag in self.flags:
            for name in (*flag.names, *([flag.negative] if flag.negative else [])):
                self._spellings[name] = flag

    def flag(self, spelling: str) -> Flag | None:
        """The flag that `spelling` means to this release's parser, or None.

        Underscores count as dashes, `--json-flag.key` is a part of --json-flag, and, as argparse has it, the
        beginning of one flag only is that flag.
        """
        if not spelling.startswith("--"):
            return self._spellings.get(spelling)
        spelling, dot, _ = spelling.replace("_", "-").partition(".")
        if dot and not str(getattr(self._spellings.get(spelling), "type", None)).startswith("json"):
            return None
        if spelling in self._spellings:
            return self._spellings[spelling]
        begun = {flag.name: flag for name, flag in self._spellings.items() if name.startswith(spelling)}
        return next(iter(begun.values())) if len(begun) == 1 and len(spelling) > 2 else None

    def has_metric(self, name: str) -> bool:
        """Whether /metrics of this release can show a series of this name."""
        bases = {metric.name: metric.kind for metric in self.metrics}
        if name in bases:
            return True
        for suffix in ("_bucket", "_sum", "_count"):
            if name.endswith(suffix) and bases.get(name.removesuffix(suffix)) in ("histogram", "unknown"):
                return True
        return name.endswith("_total") and bases.get(name.removesuffix("_total")) == "unknown"

    def dumps(self) -> str:
        """The text of data/<version>.json: one flag, variable or metric a line, so that an upgrade reads as a diff."""
        parts: dict[str, list[Any]] = {
            "flags": [flag.as_json() for flag in sorted(self.flags, key=lambda f: f.name)],
            "env": sorted(self.env),
            "metrics": [[m.name, m.kind] for m in sorted(self.metrics, key=lambda m: m.name)],
            "programs": sorted(self.programs),
        }
        body = ",\n".join(f' "{key}": [\n{json_lines(items)}\n ]' for key, items in parts.items())
        return f'{{\n "version": "{self.version}",\n "origin": "{self.origin}",\n{body}\n}}\n'

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """The inverse of `dumps`."""
        raw = orjson.loads(text)
        flags = tuple(Flag.from_json(flag) for flag in raw["flags"])
        metrics = tuple(Metric(name, kind) for name, kind in raw["metrics"])
        return cls(raw["version"], raw["origin"], flags, tuple(raw["env"]), metrics, tuple(raw["programs"]))


def json_lines(items: Iterable[Any]) -> str:
    """Items of a JSON list, one a line."""
    return ",\n".join("  " + orjson.dumps(item).decode() for item in items)


@cache
def load(version: str = PINNED) -> Engine:
    """The release whose live parser was captured; UnknownReleaseError where there is none."""
    path = DATA / f"{version}.json"
    if not path.is_file():
        raise UnknownReleaseError(f"no live capture of vLLM {version}: run `make engine-args`")
    return Engine.loads(path.read_bytes())


def release(version: str) -> tuple[int, ...]:
    """A version's numbers, for ordering."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
