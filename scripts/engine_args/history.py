"""The captured releases together: which of them had a flag, a variable, a metric or a program, and how.

data/history.json holds spans, not releases: `"--swap-space": [["0.2.7", "0.17.1", {...}]]` reads "from 0.2.7 up to
0.17.1, in this form"; a null end is the newest captured release, so adding a release changes few lines.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import orjson

from scripts.engine_args.vocabulary import DATA, Engine, Flag, Metric, UnknownReleaseError, release

Span = tuple[str, str | None, Any]


@dataclass(frozen=True)
class Life:
    """When a name existed, in captured releases: the first and last with it, and the first after it (None: never)."""

    first: str
    last: str
    gone_in: str | None


class History:
    """Every captured release, oldest first."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines = {e.version: e for e in sorted(engines, key=lambda e: release(e.version))}

    @property
    def versions(self) -> tuple[str, ...]:
        """Captured releases, oldest first."""
        return tuple(self._engines)

    def engine(self, version: str) -> Engine:
        """One release; UnknownReleaseError lists the captured ones."""
        if version not in self._engines:
            raise UnknownReleaseError(f"vLLM {version} was not captured. Captured: {', '.join(self.versions)}")
        return self._engines[version]

    def flag_life(self, spelling: str) -> Life | None:
        """When this exact flag spelling existed, or None where no captured release had it."""
        spelling = spelling.replace("_", "-") if spelling.startswith("--") else spelling
        return self._life(lambda engine: spelling in engine._spellings)

    def env_life(self, name: str) -> Life | None:
        """When this environment variable was read by vLLM, or None."""
        return self._life(lambda engine: name in engine.env)

    def metric_life(self, name: str) -> Life | None:
        """When this series existed, or None."""
        return self._life(lambda engine: engine.has_metric(name))

    def program_life(self, name: str) -> Life | None:
        """When this subcommand ("vllm serve") or `python -m` module could be started, or None."""
        return self._life(lambda engine: name in engine.programs)

    def _life(self, had: Callable[[Engine], bool]) -> Life | None:
        versions = [version for version, engine in self._engines.items() if had(engine)]
        if not versions:
            return None
        after = self.versions.index(versions[-1]) + 1
        return Life(versions[0], versions[-1], self.versions[after] if after < len(self.versions) else None)

    def dumps(self) -> str:
        """The text of data/history.json."""
        flags = self._spans(lambda e: {flag.name: _without_name(flag) for flag in e.flags})
        env = self._spans(lambda e: dict.fromkeys(e.env, 0))
        metrics = self._spans(lambda e: {metric.name: metric.kind for metric in e.metrics})
        programs = self._spans(lambda e: dict.fromkeys(e.programs, 0))
        parts = {"flags": flags, "env": env, "metrics": metrics, "programs": programs}
        body = ",\n".join(f' "{key}": {{\n{_lines(spans)}\n }}' for key, spans in parts.items())
        return f'{{\n "versions": {orjson.dumps(self.versions).decode()},\n{body}\n}}\n'

    def _spans(self, content: Callable[[Engine], dict[str, Any]]) -> dict[str, list[Span]]:
        """Per name, the runs of consecutive releases in which its description stayed the same."""
        contents = [content(engine) for engine in self._engines.values()]
        spans: dict[str, list[Span]] = {}
        for name in sorted({name for names in contents for name in names}):
            runs: list[Span] = []
            for version, names in zip(self.versions, contents, strict=True):
                if name not in names:
                    continue
                previous = self.versions[self.versions.index(version) - 1]
                if runs and runs[-1][1] == previous and runs[-1][2] == names[name]:
                    runs[-1] = (runs[-1][0], version, names[name])
                else:
                    runs.append((version, version, names[name]))
            newest = self.versions[-1]
            spans[name] = [(first, None if last == newest else last, what) for first, last, what in runs]
        return spans

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """The inverse of `dumps`."""
        raw = orjson.loads(text)
        return cls(_engine(raw, version) for version in raw["versions"])

    @classmethod
    def load(cls) -> Self:
        """The history in data/history.json."""
        return cls.loads(_text())


def _without_name(flag: Flag) -> dict[str, Any]:
    described = flag.as_json()
    if described["names"] == (flag.name,):
        del described["names"]
    return described


def _engine(raw: dict[str, Any], version: str) -> Engine:
    """One release out of the spans."""
    at = raw["versions"].index(version)

    def here(spans: list[Span]) -> Any:
        for first, last, what in spans:
            end = len(raw["versions"]) if last is None else raw["versions"].index(last)
            if raw["versions"].index(first) <= at <= end:
                return what
        return None

    flags = [(name, here(spans)) for name, spans in raw["flags"].items()]
    env, programs = (tuple(n for n, s in raw[key].items() if here(s) is not None) for key in ("env", "programs"))
    metrics = tuple(Metric(name, kind) for name, spans in raw["metrics"].items() if (kind := here(spans)))
    made = tuple(Flag.from_json({"names": [name], **what}) for name, what in flags if what is not None)
    return Engine(version, "source", made, env, metrics, programs)


@cache
def _text() -> bytes:
    return (DATA / "history.json").read_bytes()


def _lines(spans: dict[str, list[Span]]) -> str:
    return ",\n".join(f"  {orjson.dumps(name).decode()}: {orjson.dumps(s).decode()}" for name, s in spans.items())
