"""The .env file, and what .env.example promises about it. Pure but for reading the two files."""

from __future__ import annotations

import difflib
import io
import re
from dataclasses import dataclass
from pathlib import Path

from dotenv.parser import parse_stream

EXAMPLE, ENV = ".env.example", ".env"
# `# NAME=value` in the example is a known name whose default is shown; prose has no `=` right behind a name.
_OPTIONAL = re.compile(r"^#\s?([A-Z][A-Z0-9_]*)=", re.MULTILINE)


@dataclass(frozen=True)
class EnvFile:
    """values: the last one of each name, as written (nothing is expanded). mistakes: one phrase a line that is none."""

    values: dict[str, str]
    mistakes: tuple[str, ...] = ()


def parse_env(text: str) -> EnvFile:
    values: dict[str, str] = {}
    mistakes = []
    for binding in parse_stream(io.StringIO(text)):
        line = binding.original.line
        if binding.error or (binding.key is not None and binding.value is None):
            mistakes.append(f"line {line} is not NAME=value")
        elif binding.key is not None:
            if binding.key in values:
                mistakes.append(f"line {line} sets {binding.key} a second time")
            values[binding.key] = binding.value or ""
    if "\r" in text:
        mistakes.append("its lines end in CRLF, which becomes part of the values")
    return EnvFile(values, tuple(mistakes))


def example_names(text: str) -> tuple[dict[str, str], set[str]]:
    """What the example sets (name -> value), and every name it knows, commented ones included."""
    required = parse_env(text).values
    return required, set(required) | set(_OPTIONAL.findall(text))


def nearest(name: str, known: set[str]) -> str | None:
    """The known name that was probably meant."""
    near = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0.75)
    return near[0] if near else None


def read_env(root: Path) -> EnvFile | None:
    """The project's .env; None where there is none."""
    path = root / ENV
    try:
        # Not read_text: it would turn CRLF into LF, and the file is handed to compose as it is.
        return parse_env(path.read_bytes().decode("utf-8", "replace"))
    except OSError:
        return None
