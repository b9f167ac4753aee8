"""The load generator, kept ready: `vllm bench serve` of one environment, run as often as wanted."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts._children import die_with_parent

RESIDENT = Path(__file__).with_name("resident.py")


class Generator:
    """`python`: the program of an environment with vLLM. Nothing starts before the first run. A context manager."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()  # a run that still goes on dies with it
            self._process.communicate()

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """The exit code of `vllm bench serve` with these arguments, 128 and a signal's number where that ended it; what
        it said is in `log`. Raises OSError where it can't be started."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start(log.with_name("resident.log"))
        order = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        assert self._process.stdin and self._process.stdout
        answer = ""
        with contextlib.suppress(BrokenPipeError):  # it died since; its code says how
            print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if answer:
            return int(answer)
        code = self._process.wait()
        return code if code > 0 else 128 - code

    def _start(self, log: Path) -> subprocess.Popen[str]:
        with log.open("w") as said:
            return subprocess.Popen(
                [self._python, str(RESIDENT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                preexec_fn=die_with_parent(),
            )
