"""Command lines that answer a mistake in one line: what is missing or wrong, and what to write."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """`word`: the make target. `bare`: what is missing where nothing is named. `example`: a line that works.

    --help is the long answer; a mistake ends with exit code 2.
    """

    def __init__(self, word: str, bare: str, example: str, **options: Any) -> None:
        options.setdefault("prog", f"python -m scripts.{word}")
        super().__init__(**options)
        self._word, self._bare, self._example = word, bare, example

    def error(self, message: str) -> NoReturn:
        missing = message.startswith("the following arguments are required")
        self.exit(2, f"{self._word}: {self._bare if missing else message}: {self._example}\n")
