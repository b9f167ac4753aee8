"""The stack's volumes from outside: a short-lived container of the gateway's image, as the volume's own user."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scripts._compose import Compose, ComposeError

IMAGE = "vllm-stack/gateway:local"
_INSIDE = Path(__file__).with_name("_volume_side.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Volume:
    """One volume: its name in compose.yaml and on this machine, who owns what is in it, and whether it is there."""

    key: str
    name: str
    user: str
    there: bool

    def command(self, what: str, interactive: bool = False) -> list[str]:
        # No log of it: what goes through its stdout would be kept a second time, and may be gigabytes.
        return [
            "docker", "run", "--rm", *(["--interactive"] if interactive else []), "--log-driver", "none",
            "--network", "none", "--read-only",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true", "--user", self.user,
            "--volume", f"{self.name}:/volume", "--entrypoint", "python", IMAGE, "-c", _INSIDE, what, "/volume",
        ]  # fmt: skip

    def ask(self, what: str) -> str:
        """Raises ComposeError with what it said."""
        done = subprocess.run(self.command(what), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ComposeError(f"volume {self.name}: {_last(done.stderr)}")
        return done.stdout.strip()

    @contextmanager
    def reading(self, what: str) -> Iterator[IO[bytes]]:
        """Its stdout, a tar stream. Raises ComposeError at the end where it failed."""
        with subprocess.Popen(self.command(what), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                yield process.stdout
            except BaseException:
                process.kill()
                raise
            said = process.stderr.read().decode("utf-8", "replace")
        if process.returncode != 0:
            raise ComposeError(f"volume {self.name}: {_last(said)}")

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """Its stdin, for a tar stream. Raises ComposeError at the end where it failed."""
        command = self.command("write", interactive=True)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            try:
                yield process.stdin
                process.stdin.close()
            except BrokenPipeError:
                pass  # it ended; what it said follows
            except BaseException:
                process.kill()
                raise
            said = process.stderr.read().decode("utf-8", "replace")
        if process.returncode != 0:
            raise ComposeError(f"volume {self.name}: {_last(said)}")


def ensure_image(compose: Compose) -> None:
    """The helper's image, which a stack that was never started here does not have. Raises ComposeError."""
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode != 0:
        compose.run("build", "--quiet", "gateway")


def find(compose: Compose, keys: Sequence[str]) -> list[Volume]:
    """Raises ComposeError."""
    config = json.loads(compose.run("config", "--format", "json"))
    listed = subprocess.run(["docker", "volume", "ls", "--quiet"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:  # no answer is not "no volume": a backup without one would look whole
        raise ComposeError(_last(listed.stderr))
    existing = set(listed.stdout.split())
    found = []
    for key in keys:
        name = config["volumes"][key]["name"]
        users = {
            service["user"]
            for service in config["services"].values()
            for mount in service.get("volumes", [])
            if mount.get("source") == key
        }
        found.append(Volume(key, name, users.pop(), name in existing))
    return found


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"
