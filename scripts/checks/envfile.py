"""The .env file, and what .env.example promises about it. Pure but for reading the two files."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dotenv.parser import parse_stream

EXAMPLE, ENV = ".env.example", ".env"
# `# NAME=value` in the example is a known name whose default is shown; prose has no `=` right behind a name.
_OPTIONAL = re.compile(r"^#\s?([A-Z][A-Z0-9_]*)=", re.MULTILINE)


# Its value is a list of words by nature.
_WORDS = {"ENGINE_ARGS"}


@dataclass(frozen=True)
class EnvFile:
    """values: the last one of each name, as written (nothing is expanded), and the line it stands in.

    mistakes: line and phrase of each line that is none; line 0 is about the whole file.
    """

    values: dict[str, str]
    mistakes: tuple[tuple[int, str], ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)


def parse_env(text: str) -> EnvFile:
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    mistakes = []
    for binding in parse_stream(io.StringIO(text)):
        said = binding.original.string
        before = said[: len(said) - len(said.lstrip())]
        line = binding.original.line + before.count("\n")  # blank lines before it belong to it
        if binding.error or (binding.key is not None and binding.value is None):
            mistakes.append((line, f"{said.strip()[:40]!r} is not NAME=value"))
        elif binding.key is not None:
            if binding.key in values:
                mistakes.append((line, f"sets {binding.key} a second time, after line {lines[binding.key]}"))
            value = binding.value or ""
            if _unquoted_space(said, value) and binding.key not in _WORDS:
                mistakes.append((line, f'has a space in a value without quotes: {binding.key}="{value}"'))
            values[binding.key], lines[binding.key] = value, line
    if "\r" in text:
        mistakes.append((0, "its lines end in CRLF, which becomes part of the values"))
    return EnvFile(values, tuple(mistakes), lines)


def _unquoted_space(said: str, value: str) -> bool:
    quoted = said.partition("=")[2].lstrip(" \t")[:1] in ("'", '"')
    return not quoted and re.search(r"\s", value) is not None


def place(name: str, found: EnvFile | None, environ: Mapping[str, str]) -> str:
    """Where a setting comes from, to be changed there: `.env:7: NAME`, or the shell's NAME, or neither."""
    said = found.values.get(name) if found else None
    if found is not None and said is not None and environ.get(name, said) == said:
        return f"{ENV}:{found.lines[name]}: {name}"
    return f"{name} of this shell" if name in environ else name


def why_missing(name: str, found: EnvFile) -> str:
    """Why a name that must be set is not: an empty value, a typo, or nothing at all; with its line."""
    if name in found.lines:
        return f"{ENV}:{found.lines[name]}: {name} has no value"
    typo = next((other for other in found.values if nearest(other, {name})), None)
    if typo is not None:
        return f"{ENV}:{found.lines[typo]}: {typo} is unknown: did you mean {name}?"
    return f"{ENV} sets no {name}"


def example_names(text: str) -> tuple[dict[str, str], set[str]]:
    """What the example sets (name -> value), and every name it knows, commented ones included."""
    required = parse_env(text).values
    return required, set(required) | set(_OPTIONAL.findall(text))


def nearest(name: str, known: set[str], cutoff: float = 0.75) -> str | None:
    """The known name that was probably meant."""
    near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=cutoff)
    return near[0] if near else None


def misspelt(name: str, known: set[str]) -> str | None:
    """The known name that was almost certainly meant, where names of other programs are welcome.

    HTTPS_PROXY is no HTTPS_PORT, HF_TOKEN no HF_TOKEN_FILE, COMPOSE_FILE no COMPOSE_PROFILES.
    """
    return None if name in known else nearest(name, known, cutoff=0.88)


def read_env(root: Path) -> EnvFile | None:
    """The project's .env; None where there is none."""
    path = root / ENV
    try:
        # Not read_text: it would turn CRLF into LF, and the file is handed to compose as it is.
        return parse_env(path.read_bytes().decode("utf-8", "replace"))
    except OSError:
        return None
