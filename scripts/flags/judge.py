"""From a paste to findings: each flag, metric, variable, program and claim with its truth on one release. Pure."""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from scripts.engine_args import Engine, Flag, History
from scripts.engine_args.history import Life
from scripts.flags import say
from scripts.flags.finding import SECRET, Finding
from scripts.flags.nearest import nearest
from scripts.flags.parts import Paste, Start
from scripts.flags.settings import fill, filled_settings, setting
from scripts.flags.shell import Given
from scripts.flags.truth import CHANGE, Entry, Say, Truth, canonical
from scripts.flags.values import MisfitError, fit, is_variable


class Judge:
    """Knows one release, the history around it and the reviewed table."""

    def __init__(self, engine: Engine, history: History, truth: Truth) -> None:
        self.engine = engine
        self.history = history
        self.truth = truth

    @cache  # noqa: B019 - a judge lives as long as the program
    def lookup(self, name: str) -> Flag | None:
        """A flag of this release, else of the newest one that had it, else one the table describes."""
        if flag := self.engine.flag(name):
            return flag
        for version in reversed(self.history.versions):
            flag = self.history.engine(version).flag(name)
            if flag and (name in flag.names or canonical(flag, name) in (flag.name, flag.negative)):
                return flag
        form = self.truth.form(canonical(None, name))
        return Flag((canonical(None, name),), "switch" if form == "switch" else "value") if form else None

    def judge(self, paste: Paste) -> list[Finding]:
        """The findings, in the order a reader meets them: programs, flags, docker, variables, metrics, claims."""
        findings: list[Finding] = [say.trap(trap) for trap in sorted(paste.traps)]
        for start in paste.starts:
            findings += self._start(start)
        findings += self._mentions(paste, findings)
        for name, (value, line) in paste.variables.items():
            if not any(f.kind == "variable" and f.subject.en.split("=")[0] == name for f in findings):
                findings.append(self.variable(name, value, line))
        findings += [self.metric(name, line) for name, line in paste.metrics.items()]
        findings += self._claims(paste)
        return findings

    def _start(self, start: Start) -> Iterator[Finding]:
        if start.launcher not in ("", "config file", "LLM(...)", "docker"):
            yield self.program(start.launcher, start.line)
        if self._is_server(start.launcher):
            for given in _last_wins(start.given, self):
                yield self.flag(given, config=start.launcher == "config file")
            yield from self._together(start)
        if start.strays and start.launcher in ("vllm serve", "vllm-entrypoint", ""):
            yield say.stray(start.strays, start.line)
        yield from self._docker(start)
        for name, value in start.env:
            yield self.variable(name, value, start.line)

    def _is_server(self, launcher: str) -> bool:
        """Whether what is started takes the server's flags; a program nobody knows is taken for a misspelt one."""
        others = launcher.startswith("awq") or (launcher in self.engine.programs and launcher != "vllm serve")
        return not others or launcher.endswith("api_server")

    def _mentions(self, paste: Paste, already: list[Finding]) -> Iterator[Finding]:
        """Flags named in prose; those that a command already gave with a value aren't said twice."""
        seen = {f.subject.en for f in already}
        named = {f.subject.en.split()[0] for f in already if f.kind in ("flag", "docker")}
        valued = {given.name for given in paste.mentions if given.values}
        for given in paste.mentions:
            bare = not given.values and (given.name in named or given.name in valued)
            if bare or str(given) in seen:
                continue
            seen.add(str(given))
            if given.name in self.truth.names("docker"):
                yield from self._docker(Start("docker", given.line, [], docker=[given]))
            else:
                yield self.flag(given)

    def program(self, name: str, line: int) -> Finding:
        """How the engine was started."""
        life = self.history.program_life(name)
        exists = name in self.engine.programs or name == "vllm"
        for entry in self.truth.about("programs", name, None, self.engine.version):
            if exists or entry.verdict not in ("real", "harmless", "harmful"):
                return self._from_entry("program", Say(en=name, zh=name), entry, line, life)
        if exists:
            return say.plain("program", name, line) if self._is_server(name) else say.other_program(name, line)
        near = nearest(name, list(self.engine.programs))
        return say.missing("program", name, line, self.engine.version, life, near, self.history.versions)

    def flag(self, given: Given, *, config: bool = False) -> Finding:
        """One flag with its value."""
        flag = self.engine.flag(given.name)
        name = canonical(flag or self.lookup(given.name), given.name)
        life = self.history.flag_life(name)
        shown = Given(name, ("<hidden>",)) if SECRET.search(name) and given.values else given
        subject = Say(en=str(shown), zh=str(shown))
        entry = self._entry(name, given, flag)
        if flag is None:
            if entry:
                return self._from_entry("flag", subject, entry, given.line, life, given)
            near = nearest(name, [n for f in self.engine.flags for n in f.names if n.startswith("--")])
            return say.missing("flag", str(shown), given.line, self.engine.version, life, near, self.history.versions)
        try:
            value = fit(flag, given)
        except MisfitError as misfit:
            if entry and entry.when:  # the table knows this very value
                return self._from_entry("flag", subject, entry, given.line, life, given)
            settings = self._meant(flag, misfit.instead)
            if config and flag.form == "boolean":
                return say.false_in_config(flag, subject, given.line, settings)
            return say.misfit(subject, misfit.say, given.line, settings)
        settings = {} if given.value and is_variable(given.value) else setting(flag, value)
        if entry:
            found = self._from_entry("flag", subject, entry, given.line, life, given, settings)
            multiple = say.multiple(flag, given, value)
            return dataclasses.replace(found, why=found.why + multiple) if multiple else found
        if flag.form not in ("switch", "list") and value == flag.default and flag.default is not None:
            return say.default(subject, flag, given.line)
        return say.real_flag(subject, flag, given, value, settings)

    def _meant(self, flag: Flag, value: Any) -> dict[str, Any]:
        """What a badly written flag puts into the profile: what it meant, unless the table calls that harmful."""
        if value is None:
            return {}
        name = flag.negative if value is False and flag.negative else flag.name
        meant = Given(name, () if isinstance(value, bool) else (str(value),))
        entry = self._entry(name, meant, flag)
        return {} if entry and entry.verdict in CHANGE else setting(flag, value)

    def _entry(self, name: str, given: Given, flag: Flag | None) -> Entry | None:
        """The table's word for it: one about absence only where the flag is absent, and the other way round."""
        absent = {"never existed", "removed", "not yet"}
        for entry in self.truth.about("flags", name, given.value, self.engine.version):
            if flag is None and (entry.verdict in absent or entry.verdict == "renamed"):
                return entry
            if flag is not None and entry.verdict not in absent:
                return entry
        return None

    def _together(self, start: Start) -> Iterator[Finding]:
        """Claims about flags that only mean something side by side."""
        values = {canonical(self.lookup(g.name), g.name): g.value or "" for g in start.given}
        for entry in self.truth.entries:
            if entry.together and entry.holds(self.engine.version):
                met = (
                    (name not in values)
                    if pattern == "absent"
                    else bool(re.fullmatch(pattern, values.get(name, "\0"), re.IGNORECASE))
                    for name, pattern in entry.together.items()
                )
                if all(met):
                    yield self._from_entry("claim", Say(en=entry.claim, zh=entry.claim_zh), entry, start.line, None)

    def _docker(self, start: Start) -> Iterator[Finding]:
        """Options of docker run, and the image, where the table knows them."""
        image = [Given("image", (start.image,), start.line)] if start.image else []
        for given in [*start.docker, *image]:
            for entry in self.truth.about("docker", given.name, given.value, self.engine.version):
                text = str(given) if not given.joined else f"{given.name}={given.value}"
                yield self._from_entry("docker", Say(en=text, zh=text), entry, given.line, None, given)
                break

    def variable(self, name: str, value: str | None, line: int) -> Finding:
        """One environment variable."""
        life = self.history.env_life(name)
        hidden = "<hidden>" if SECRET.search(name) and value else value
        text = f"{name}={hidden}" if hidden is not None else name
        exists = name in self.engine.env
        for entry in self.truth.about("env", name, value, self.engine.version):
            if exists == (entry.verdict not in ("removed", "never existed", "renamed")):
                given = Given(name, (value,) if value is not None else ())
                return self._from_entry("variable", Say(en=text, zh=text), entry, line, life, given)
        if exists or not name.startswith("VLLM_"):
            return say.variable(text, name, value, line, own=exists)
        near = nearest(name, list(self.engine.env))
        return say.missing("variable", text, line, self.engine.version, life, near, self.history.versions)

    def metric(self, name: str, line: int) -> Finding:
        """One series name."""
        life = self.history.metric_life(name)
        exists = self.engine.has_metric(name)
        for entry in self.truth.about("metrics", name, None, self.engine.version):
            if exists == (entry.verdict not in ("removed", "never existed", "renamed")):
                return self._from_entry("metric", Say(en=name, zh=name), entry, line, life)
        if exists:
            return say.plain("metric", name, line)
        if self.engine.has_metric(name + "_total"):
            return say.without_total(name, line)
        near = nearest(name, [metric.name for metric in self.engine.metrics])
        return say.missing("metric", name, line, self.engine.version, life, near, self.history.versions)

    def _claims(self, paste: Paste) -> Iterator[Finding]:
        """What the prose asserts."""
        for entry in self.truth.entries:
            matches = [found for pattern in entry.says if (found := re.search(pattern, paste.text, re.IGNORECASE))]
            if matches and entry.holds(self.engine.version):
                line = paste.text.count("\n", 0, min(found.start() for found in matches)) + 1
                yield self._from_entry("claim", Say(en=entry.claim, zh=entry.claim_zh), entry, line, None)

    def _from_entry(
        self,
        kind: str,
        subject: Say,
        entry: Entry,
        line: int,
        life: Life | None,
        given: Given | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Finding:
        """A finding in the table's words."""
        value = given.value if given else None
        verdict = entry.verdict
        keep = entry.keep if entry.keep is not None else verdict == "real"
        chosen = filled_settings(entry.becomes, value) if entry.becomes else (settings or {}) if keep else {}
        return Finding(
            kind,
            subject,
            verdict,
            why=Say(en=fill(entry.why, value), zh=fill(entry.why_zh, value)),
            write=Say(en=fill(entry.write, value), zh=fill(entry.write_zh, value)) if entry.write else None,
            effect=Say(en=entry.effect, zh=entry.effect_zh) if entry.effect else None,
            evidence=entry.evidence,
            hardware=Say(en=entry.on, zh=entry.on_zh) if entry.on else None,
            line=line,
            gone_in=life.gone_in if life and verdict in ("removed", "renamed") else None,
            entry=entry.id,
            settings=chosen,
            environment={key: fill(text, value) for key, text in entry.environment.items()},
        )


def _last_wins(given: list[Given], judge: Judge) -> list[Given]:
    """Each flag once, as argparse takes it: the last one counts; dotted parts of a JSON flag all count."""
    last = {one.name if "." in one.name else canonical(judge.lookup(one.name), one.name): one for one in given}
    return list(last.values())
