"""What make flags answers for a paste, in the form tests compare."""

from functools import cache

from scripts.engine_args import PINNED, History, load
from scripts.flags.finding import Finding
from scripts.flags.judge import Judge
from scripts.flags.parts import Paste
from scripts.flags.paste import take_apart
from scripts.flags.profile import Profile, build
from scripts.flags.truth import Truth


@cache
def judge(version: str = PINNED) -> Judge:
    history = History.load()
    return Judge(load() if version == PINNED else history.engine(version), history, Truth.load())


def parts(text: str) -> Paste:
    return take_apart(text, judge().lookup)


def findings(text: str, version: str = PINNED) -> list[Finding]:
    return judge(version).judge(take_apart(text, judge(version).lookup))


def verdicts(text: str, version: str = PINNED) -> dict[str, str]:
    return {finding.subject.en: finding.verdict for finding in findings(text, version)}


def entries(text: str, version: str = PINNED) -> dict[str | None, str]:
    return {finding.entry: finding.verdict for finding in findings(text, version)}


def profile(text: str) -> Profile:
    return build(parts(text), findings(text))
