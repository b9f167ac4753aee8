"""The truth about a pasted command line or guide: `python -m scripts.flags [OPTIONS] [PASTE...]`.

Reads PASTE, a file (--file), or standard input. Exit: 0 nothing to change, 1 something to change, 2 input that
cannot be read or holds nothing to judge.
"""

import argparse
import io
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import orjson

from scripts._command import Parser
from scripts.engine_args import PINNED, Engine, History, UnknownReleaseError, load
from scripts.flags.finding import Finding
from scripts.flags.judge import Judge
from scripts.flags.paste import take_apart
from scripts.flags.profile import Profile, build
from scripts.flags.render import Style, report
from scripts.flags.text import InputError, decode
from scripts.flags.truth import Truth

USAGE = """\
make flags ARGS='vllm serve MODEL --block-size 256'   a command line
make flags FILE=guide.txt                             a file: a command, a compose file, a whole guide
pbpaste | make flags                                  standard input
Options (in ARGS, before or after the paste): --lang zh, --against 0.26.0, --write profile.yaml, --json"""


def options() -> argparse.ArgumentParser:
    """Our own options; their names are no flag of any vLLM release, so that both may stand in one line."""
    parser = Parser(
        "flags",
        prog="make flags",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--file", type=Path, help="read the paste from a file")
    parser.add_argument("--against", default=PINNED, metavar="RELEASE", help=f"judge by another release than {PINNED}")
    parser.add_argument("--lang", choices=("en", "zh"), default="en", help="language of the answer")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the profile there (never over another file)")
    parser.add_argument("--force", action="store_true", help="let --write replace a file")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    ours, paste_words = split(sys.argv[1:] if argv is None else argv)
    args = options().parse_args(ours)
    try:
        engine, history = release(args.against)
        text, source = read(args.file, paste_words)
        judge = Judge(engine, history, Truth.load())
        paste = take_apart(text, judge.lookup)
        findings = judge.judge(paste)
        if not findings:
            raise InputError(
                f"nothing to judge in {source}: no flag, metric, variable or claim that is known.\n{USAGE}"
            )
        profile = build(paste, findings)
        if args.write and profile.settings:
            write(args.write, profile.yaml(engine.version, source), force=args.force)
    except (InputError, UnknownReleaseError) as error:
        print(f"flags: {error}", file=sys.stderr)
        return 2
    if args.json:
        sys.stdout.write(as_json(engine, findings, profile, source))
    else:
        sys.stdout.write(report(findings, profile, engine.version, engine.origin, source, style(args.lang)))
        if args.write:
            print(f"\n{args.write}: {'written' if profile.settings else 'not written, as there is no profile'}.")
    return int(any(finding.change for finding in findings))


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the words of the paste, wherever ours stand among them."""
    takes_value = {"--file": 1, "--against": 1, "--lang": 1, "--write": 1, "--force": 0, "--json": 0}
    ours: list[str] = []
    words: list[str] = []
    if argv[:1] in (["-h"], ["--help"]):
        return argv[:1], []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name = word.split("=", 1)[0]
        if name not in takes_value:
            words.append(word)
            continue
        ours.append(word)
        if takes_value[name] and "=" not in word and rest:
            ours.append(rest.pop(0))
    return ours, words


def release(version: str) -> tuple[Engine, History]:
    """The release to judge by: the live capture where there is one, else what was read from its source."""
    history = History.load()
    return (load() if version == PINNED else history.engine(version)), history


def read(file: Path | None, words: list[str]) -> tuple[str, str]:
    """The paste and what to call it; InputError where there is none or it is no text."""
    if file and words:
        raise InputError(f"both a file and a paste ({shlex.join(words)[:60]}): give one of them")
    if file:
        try:
            return decode(file.read_bytes()), file.name
        except OSError as error:
            raise InputError(f"{file}: {error.strerror or error}") from error
    if words:
        return (words[0] if len(words) == 1 else shlex.join(words)), "a pasted command line"
    if sys.stdin.isatty():
        raise InputError(f"nothing pasted.\n{USAGE}")
    return decode(sys.stdin.buffer.read()), "a pasted text"


def write(path: Path, text: str, *, force: bool) -> None:
    """Write the profile, whole or not at all; InputError where that cannot be done."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"{path}: vLLM reads config files named .yaml or .yml only")
    if path.exists() and not force:
        raise InputError(f"{path} is there already: name another file, or add --force")
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path}: {error.strerror or error}") from error


def style(lang: str) -> Style:
    """Colours and width of the terminal, none of them where the output is no terminal."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    return Style(lang, max(width, 50), colour=terminal and "NO_COLOR" not in os.environ)


def as_json(engine: Engine, findings: list[Finding], profile: Profile, source: str) -> str:
    """The answer for programs."""
    rows: list[dict[str, Any]] = []
    for finding in findings:
        row: dict[str, Any] = {
            "kind": finding.kind,
            "subject": finding.subject.en,
            "verdict": finding.verdict,
            "change": finding.change,
            "line": finding.line,
            "gone_in": finding.gone_in,
            "entry": finding.entry,
            "evidence": finding.evidence or None,
            "hardware": finding.hardware.en if finding.hardware else None,
        }
        for key in ("why", "write", "effect"):
            said = getattr(finding, key)
            row |= {key: said.en if said else None, f"{key}_zh": said.zh if said else None}
        rows.append(row)
    answer = {
        "release": engine.version,
        "origin": engine.origin,
        "findings": rows,
        "profile": profile.settings,
        "no_profile": profile.why_none.en if profile.why_none else None,
        "profile_yaml": profile.yaml(engine.version, source),
        "env": profile.env,
    }
    return orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode() + "\n"


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):  # Chinese in a terminal that has none
        sys.stdout.reconfigure(errors="replace")
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - closed by the interpreter's end
        code = 1
    sys.exit(code)
