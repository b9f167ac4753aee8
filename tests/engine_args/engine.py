"""Starts the two probes once a test run, and asks them."""

import atexit
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine" / "bin" / "python"


class Probe:
    """A running probe. It ends when its standard input closes, at the latest with this process."""

    def __init__(self, script: str) -> None:
        self.log = ROOT / ".pytest_cache" / f"{script}.log"
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), str(Path(__file__).parent / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={"PATH": os.environ["PATH"], "HOME": str(Path.home()), "HF_HUB_OFFLINE": "1"},
            )
        atexit.register(self.close)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the probe died: {self.log.read_text()[-2000:]}"
        found: dict[str, Any] = json.loads(line)
        return found


@functools.cache
def cpu_probe() -> Probe:
    return Probe("cpu_probe.py")


@functools.cache
def cuda_probe() -> Probe:
    return Probe("cuda_probe.py")
