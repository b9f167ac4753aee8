"""One engine measured: its prefill rate, its KV tokens, and the most it serves within the SLO."""

from __future__ import annotations

import collections
import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench import drive, engine, workloads
from scripts.bench.generator import Generator
from scripts.bench.plan import Row, Workload
from scripts.tune import decide, space

START_S = 1800
SHORT_TOKENS = 16  # of a short completion, where answers are cut at all: the merge limit asks about many small calls


@dataclass(frozen=True)
class Setup:
    """What every trial has in common."""

    launcher: engine.Launcher
    generator: Generator
    model: str
    workload: Workload
    slo: decide.Slo
    most_in_flight: int
    waves: int  # requests of a measurement: its number in flight times this
    answer_tokens: int | None  # of every answer; None: the workload's own lengths
    environment: Mapping[str, str]
    folder: Path


@dataclass
class Probe:
    """An engine that is up. Measurements never repeat a prompt."""

    setup: Setup
    target: engine.Target
    boot_s: float = 0.0
    slots: int | None = None  # the engine's max-num-seqs, where the flags say it
    levels: dict[int, tuple[bool, float]] = field(default_factory=dict)
    serve_s: float = 0.0  # how long the last `serve` took
    decode: float | None = None  # its decode rate, tokens/s
    _repeats: collections.Counter[tuple[str, int | None]] = field(default_factory=collections.Counter)

    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second while nothing but prompts is computed."""
        row = Row(name="prefill", workload="long", requests=4, in_flight=2, answer_tokens=1, endpoint="completions")
        figures = self.drive(row.model_copy(update={"stream": False}), self.target)
        return float(figures["prompt_tokens"] / figures["duration_s"])

    def serve(self, in_flight: int) -> tuple[bool, float, dict[str, Any]]:
        """(within the SLO?, generation tokens/s, figures) of the workload with so many in flight."""
        row = Row(
            name="serve",
            workload=self.setup.workload,
            requests=max(8, in_flight * self.setup.waves),
            in_flight=in_flight,
            answer_tokens=self.setup.answer_tokens,
        )
        figures = self.drive(row, self.target)
        self.serve_s = float(figures["duration_s"])
        self.decode = decide.decode_tokens_per_s(figures, min(in_flight, self.slots or in_flight))
        return decide.within(figures, self.setup.slo), float(figures["generation_tokens_per_s"]), figures

    def times(self) -> tuple[list[float], list[float]]:
        """Every answered stream's time to its first token, and every time between two tokens, s, of the last drive."""
        return drive.times(self.setup.folder)

    def saturate(self, start: int) -> tuple[int, float]:
        """(number in flight, generation tokens/s) of the most it serves within the SLO; (0, 0.0) where nothing is."""
        while (level := decide.next_level(self.levels, start, self.setup.most_in_flight)) is not None:
            kept, rate, _ = self.serve(level)
            self.levels[level] = (kept, rate)
        return decide.saturation(self.levels)

    def short_answers(self, in_flight: int, through: engine.Target) -> float:
        """Short whole completions a second through a gateway."""
        tokens = self.setup.answer_tokens
        row = Row(
            name="short",
            workload="short",
            requests=in_flight * self.setup.waves,
            in_flight=in_flight,
            answer_tokens=None if tokens is None else min(tokens, SHORT_TOKENS),
            endpoint="completions",
            stream=False,
            through="gateway",
        )
        return float(self.drive(row, through)["requests_per_s"])

    def drive(self, row: Row, target: engine.Target) -> dict[str, Any]:
        """Figures of a row as scripts.bench.drive gives them, with prompts not sent before."""
        self._repeats[row.name, row.in_flight] += 1
        # The same lengths in every trial, or chance would choose; words that no trial sent before.
        seed = f"{row.name} {row.in_flight} {self._repeats[row.name, row.in_flight]}"
        requests = workloads.requests(
            row.workload,
            row.requests,
            seed=seed,
            nonce=secrets.token_hex(8),
            max_model_len=target.max_model_len,
            answer_tokens=row.answer_tokens,
        )
        return drive.measure(
            row,
            requests,
            target,
            generator=self.setup.generator,
            tokenizer=self.setup.model,
            folder=self.setup.folder,
        )


@contextlib.contextmanager
def booted(setup: Setup, flags: space.Flags, name: str) -> Iterator[Probe]:
    """An engine with these flags; gone afterwards. Raises engine.StartError."""
    begin = time.monotonic()
    log = setup.folder / f"{name}.log"
    arguments = engine.arguments(flags)
    with engine.starting(
        setup.launcher, setup.model, arguments, environment=setup.environment, log=log, start_s=START_S
    ) as up:
        target = engine.look(up())
        slots = flags.get("max-num-seqs")
        yield Probe(setup, target, time.monotonic() - begin, slots if isinstance(slots, int) else None)
