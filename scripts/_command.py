"""Command lines that answer a mistake in one line: what is missing or wrong, and what to write."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

_MISSING = "the following arguments are required: "
_STRANGE = "unrecognized arguments: "


def whole_number(text: str) -> int:
    """What type=int reads, with words for a person."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number") from None


def number(text: str) -> float:
    """What type=float reads, with words for a person."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number") from None


def web_address(text: str) -> str:
    """Where something answers over HTTP: `type` of an option that takes one."""
    scheme, there, rest = text.partition("://")
    if scheme.lower() not in ("http", "https") or not there or not rest.strip("/"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected an address such as http://127.0.0.1:8000")
    return text


class Parser(argparse.ArgumentParser):
    """`word`: the make target. `bare`: what is missing where nothing is named. `example`: a line that works.

    --help is the long answer, and named where there is no example; a mistake ends with exit code 2.
    """

    def __init__(self, word: str, bare: str = "", example: str = "", **options: Any) -> None:
        options.setdefault("prog", f"python -m scripts.{word.replace('-', '_')}")
        super().__init__(**options)
        self.register("type", int, whole_number)
        self.register("type", float, number)
        self._word, self._bare, self._example = word, bare, example

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            message = self._bare or f"missing: {message.removeprefix(_MISSING)}"
        elif message.startswith(_STRANGE):
            message = self._strange(message.removeprefix(_STRANGE))
        end = f": {self._example}" if self._example else f" (make {self._word} ARGS=--help tells more)"
        self.exit(2, f"{self._word}: {message}{end}\n")

    def _strange(self, words: str) -> str:
        """The option that was probably meant, where one is near."""
        name = words.split()[0].partition("=")[0] if words.strip() else ""
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
        meant = f": did you mean {near[0]}?" if near and name.startswith("-") else ""
        return f"{_STRANGE}{words}{meant}"
