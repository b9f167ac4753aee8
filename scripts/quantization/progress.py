"""What a job is doing, how long it took and will take: a line a layer, and a file for whoever comes after."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.quantization import manifest

STATE = "progress.json"


def utc(seconds: float) -> str:
    """ISO 8601, whole seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def human(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `1 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class Progress:
    """Mutable; one job writes it. The state file is best effort: it explains an interrupted run, nothing more."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._say, self._clock = folder / STATE, say, clock
        self.started_at = utc(wall())
        self.stages: dict[str, float] = {}
        self.layers: list[manifest.Layer] = []
        self._layer_began = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a part of the job, also one that fails."""
        began = self._clock()
        self._write(name)
        try:
            yield
        finally:
            self.stages[name] = round(self._clock() - began, 1)

    def layer_begins(self) -> None:
        self._layer_began = self._clock()

    def layer_ends(self, total: int, error: float | None = None) -> None:
        """error: the layer's relative output error, see `manifest.Layer`."""
        took = self._clock() - self._layer_began
        self.layers.append(manifest.Layer(index=len(self.layers), s=round(took, 2), error=error))
        done = len(self.layers)
        left = sum(layer.s for layer in self.layers) / done * (total - done)
        told = "" if error is None else f", output error {error:.2%}"
        ahead = f", about {human(left)} left" if done < total else ""
        self._write(f"layer {done} of {total}")
        self._say(f"layer {done} of {total}: {human(took)}{told}{ahead}")

    def _write(self, doing: str) -> None:
        state = {"pid": os.getpid(), "started_at": self.started_at, "doing": doing}
        part = self._state.with_suffix(".part")
        try:
            part.write_text(json.dumps(state) + "\n", encoding="utf-8")
            part.replace(self._state)
        except OSError:
            return


def left_behind(folder: Path) -> str:
    """What a run that ended without finishing says of itself."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return f"a run of {state['started_at']} ended unfinished at: {state['doing']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a run ended unfinished"
