"""One job: plan, alone, quantize into a directory that does not count, finish, rename."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.planner.numbers import GIB, gib
from scripts.quantization import QuantizeError, card, finish, manifest, memory, producers, source, trial
from scripts.quantization.plan import Plan, environment
from scripts.quantization.progress import STATE, Progress, left_behind, utc

LOCK = ".quantize.lock"
_KNOBS = "lower memory.parallel_blocks, then clip_tokens, then calibration.blocks"


def run(plan: Plan, say: Callable[[str], None], *, stock: bool = False) -> manifest.Manifest:
    """Makes plan.target, or leaves nothing that counts and raises QuantizeError. Whatever else is raised ends the job
    in the same tidy way."""
    home = plan.target.parent
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home):
        _clear(plan, say)
        try:
            plan.partial.mkdir()
            made = _make(plan, Progress(plan.partial, say), say, stock)
            (plan.partial / STATE).unlink(missing_ok=True)
            finish.publish(plan.partial, plan.target)
        except BaseException:
            shutil.rmtree(plan.partial, ignore_errors=True)
            raise
    return made


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    """One job a model; the kernel lets go of the lock however the job ends."""
    with (home / LOCK).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise QuantizeError(
                f"{file.read().strip() or 'another job'} is at work in {home}: wait for its end"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _clear(plan: Plan, say: Callable[[str], None]) -> None:
    """What interrupted runs left, of these inputs and of others: nobody is at work on it, for we hold the lock."""
    for left in sorted(plan.target.parent.glob(".*.partial")):
        say(f"found {left.name}: {left_behind(left)}; it is removed, and this run starts from the beginning")
        shutil.rmtree(left)


def _make(plan: Plan, progress: Progress, say: Callable[[str], None], stock: bool) -> manifest.Manifest:
    assert plan.located and plan.device and plan.prepared and plan.need
    os.environ.update(environment(plan.device))
    located = plan.located
    if located.on_hub:
        with progress.stage("download"):
            located = source.download(located, say, weights=True)
    directory = located.directory
    assert directory is not None
    source_files = plan.source_files or {path.name: manifest.hash_file(path) for path in source.files(directory)}
    limit = plan.config.memory.ram_gib
    out = plan.partial / "out"
    out.mkdir()
    with _said_shortly(plan), memory.bounded(None if limit is None else round(limit * GIB)):
        with progress.stage("trial"):
            _bound(plan)
            trial.run(plan.config, plan.device.kind, plan.partial)
            produce = producers.load(plan.config.producer)
        work = producers.Work(
            source=directory,
            out=out,
            config=plan.config,
            blocks=plan.prepared.blocks,
            device=plan.device.kind,
            clip_tokens=plan.clip_tokens,
            layers=int(plan.raw["num_hidden_layers"]),
            inputs_on_host=plan.inputs_on_host,
            stock=stock,
        )
        quantization = produce(work, progress)
    with progress.stage("finish"):
        method = producers.METHODS[plan.config.producer]
        finish.configs(directory, out, quantization, plan.end_of_turn)
        finish.check(out, method)
        for path in out.iterdir():
            if path.suffix == ".safetensors":
                finish.settle(path)
            path.rename(plan.partial / path.name)
        out.rmdir()
        (plan.partial / manifest.HELD_OUT).write_bytes(plan.prepared.held_out)
        (plan.partial / STATE).unlink(missing_ok=True)
        made = _manifest(plan, progress, source_files, quantization, located.revision, stock)
        text = card.write(made, _licence(directory))
        (plan.partial / manifest.CARD).write_text(text, encoding="utf-8")
        made = made.model_copy(update={"files": finish.files(plan.partial)})
    manifest.write(plan.partial, made)
    return made


def _manifest(
    plan: Plan,
    progress: Progress,
    source_files: dict[str, manifest.File],
    quantization: dict[str, Any],
    revision: str,
    stock: bool,
) -> manifest.Manifest:
    assert plan.located and plan.device and plan.prepared
    effective = plan.config.model_dump() | {"clip_tokens": plan.clip_tokens} | ({"stock": True} if stock else {})
    return manifest.Manifest(
        name=plan.config.name,
        digest=plan.digest,
        producer=plan.config.producer,
        quantization=quantization,
        config=effective,
        source=manifest.Source(
            model=plan.located.model,
            revision=revision,
            architecture=str((plan.raw.get("architectures") or ["unknown"])[0]),
            files=source_files,
        ),
        calibration=plan.prepared.calibration,
        held_out=plan.prepared.held_out_info,
        versions=producers.versions(plan.config.producer) | {"python": platform.python_version()},
        run=manifest.Run(
            started_at=progress.started_at,
            finished_at=utc(time.time()),
            stages_s=dict(progress.stages),
            device=plan.device.kind,
            device_name=plan.device.name,
            peak_ram_bytes=memory.peak(),
            peak_gpu_bytes=_card_peak(plan),
            layers=tuple(progress.layers),
        ),
        files=finish.files(plan.partial),
    )


def _bound(plan: Plan) -> None:
    """The job's own allocator refuses what would pass the limit: an engine on the same card loses nothing to us."""
    device = plan.device
    if device is None or device.card is None or device.limit is None:
        return
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(device.limit / total, 1.0), 0)
    torch.cuda.reset_peak_memory_stats()


def _card_peak(plan: Plan) -> int | None:
    if plan.device is None or plan.device.card is None:
        return None
    import torch

    return int(torch.cuda.max_memory_reserved())


@contextmanager
def _said_shortly(plan: Plan) -> Iterator[None]:
    """A lack of memory or disk as one line with the setting to change; other errors pass."""
    try:
        yield
    except memory.OverBoundError as error:
        raise QuantizeError(f"stopped at memory.ram_gib ({error}): raise it, or {_KNOBS}") from None
    except MemoryError:
        raise QuantizeError(f"out of memory: {_KNOBS}") from None
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        text = str(error)
        if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in text:
            limit = plan.device.limit if plan.device else None
            allowed = f" (this job may take {gib(limit)})" if limit else ""
            raise QuantizeError(f"out of memory on the card{allowed}: {_KNOBS}, or --device cpu") from None
        if "can't allocate memory" in text:
            raise QuantizeError(f"out of memory: {_KNOBS}") from None
        raise


def _licence(directory: Path) -> str:
    """From the original's own card, where it has one; else from what `make model` noted."""
    card_text = directory / "README.md"
    if card_text.is_file():
        for line in card_text.read_text(encoding="utf-8", errors="replace").splitlines()[:60]:
            if line.startswith("license:"):
                return line.partition(":")[2].strip()
    noted = source.read_json(directory / "source.json").get("licence") or source.read_json(
        directory / "manifest.json"
    ).get("license")
    return str(noted or "unknown")
