"""Looks at everything a job rests on, and says what a run would do. Loads no weight, changes nothing but caches."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.checks import Check, ok
from scripts.checks.probes import Probes
from scripts.planner import PlanError
from scripts.planner.numbers import gib
from scripts.quantization import (
    QuantizeError,
    calibration,
    config,
    datasets,
    estimate,
    manifest,
    preflight,
    producers,
    source,
    vram,
)

RECIPE = 1  # raised when the job's own code gives another result from the same inputs
CLIP_TOKENS = {"cuda": 512, "cpu": 64}
_NOT_IN_DIGEST = ("name", "device", "memory", "source")  # they do not decide the result


@dataclass
class Plan:
    """`done`: the finished artifact of the same inputs. `checks` hold what speaks against a run.

    Filled in order of cost; what was not reached because of a failed check is None.
    """

    config: config.Config
    models: Path
    checks: list[Check] = field(default_factory=list)
    located: source.Located | None = None
    raw: dict[str, Any] = field(default_factory=dict)
    source_files: dict[str, manifest.File] = field(default_factory=dict)
    device: vram.Device | None = None
    need: estimate.Need | None = None
    inputs_on_host: bool = False
    prepared: calibration.Prepared | None = None
    end_of_turn: int | None = None
    digest: str = ""
    done: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def target(self) -> Path:
        return manifest.artifact_dir(self.models, self.config.name, self.digest)

    @property
    def partial(self) -> Path:
        return manifest.partial_dir(self.models, self.config.name, self.digest)

    @property
    def refused(self) -> list[Check]:
        return preflight.refused(self.checks)

    @property
    def clip_tokens(self) -> int:
        assert self.device is not None
        return self.config.clip_tokens or CLIP_TOKENS[self.device.kind]


@dataclass(frozen=True)
class Ask:
    """What the command line says. stop_engine: the card's memory is judged as if the engine's were free."""

    config: config.Config
    models: Path
    stop_engine: bool = False
    stock: bool = False


def _tokenizer(directory: Path) -> calibration.Tokenizer:
    try:
        from scripts.quantization.tokens import HfTokenizer  # late: transformers takes seconds

        return HfTokenizer(directory)
    except ImportError as error:
        raise QuantizeError(
            f"{error}: run this in the job's own environment (make .venv-quantize/.installed) or its image"
        ) from None


def look(
    ask: Ask,
    probes: Probes,
    say: Callable[[str], None],
    load: Callable[[Path], calibration.Tokenizer] = _tokenizer,
) -> Plan:
    """Raises QuantizeError where a question cannot even be asked. load: a model directory's tokenizer."""
    plan = Plan(ask.config, ask.models)
    plan.checks += preflight.rules(ask.config)
    plan.located = source.locate(ask.config.source.model, ask.config.source.revision, ask.models, probes.environ)
    where = plan.located
    if where.on_hub:
        where = source.download(where, say, weights=False)
        plan.located = source.Located(where.model, where.revision, None)
    assert where.directory is not None
    plan.raw = preflight.raw_config(where.directory)
    plan.checks += preflight.model(plan.raw, ask.config)
    if plan.refused:
        return plan
    hashes = source.Hashes(_made(datasets.cache_dir(probes.environ)) / "hashes.json")
    texts = datasets.find(ask.config.calibration, hashes, say)
    if not plan.located.on_hub:
        plan.source_files = {path.name: hashes.of(path) for path in source.files(where.directory)}
    hashes.keep()
    plan.digest = _digest(plan, texts.identity, ask.stock)
    plan.done = _is_done(plan)
    if plan.done:
        return plan
    plan.checks += preflight.directory(where.directory)[1 if plan.located.on_hub else 0 :]
    plan.checks.append(preflight.writable(ask.models, ask.config.name))
    _room(plan, ask, probes)
    if not plan.refused:
        _calibrate(plan, load(where.directory), texts)
    return plan


def _digest(plan: Plan, texts: str, stock: bool) -> str:
    """Of what decides the result. A hub's commit stands for its files; a build's suffix (+cpu) is left out."""
    assert plan.located is not None
    where = plan.located
    identity: object = {"model": where.model, "commit": where.revision}
    if where.revision == "local":
        identity = {name: file.sha256 for name, file in plan.source_files.items()}
    said = plan.config.model_dump(exclude=set(_NOT_IN_DIGEST))
    said["calibration"] = {k: v for k, v in said["calibration"].items() if k not in ("source", "sha256")}
    versions = {name: version.split("+")[0] for name, version in producers.versions(plan.config.producer).items()}
    parts = {"recipe": RECIPE, "source": identity, "config": said, "texts": texts, "versions": versions}
    return manifest.digest_of(parts | ({"stock": True} if stock else {}))


def _is_done(plan: Plan) -> bool:
    """A directory of that name that is not as its manifest says is nothing that a job left: it was touched later."""
    if not plan.target.is_dir():
        return False
    found = manifest.read(plan.target)
    wrong = next(manifest.damage(plan.target, found), None)
    if wrong:
        raise QuantizeError(f"{plan.target} was finished, but {wrong}: move the directory away, then run this again")
    return True


def _room(plan: Plan, ask: Ask, probes: Probes) -> None:
    assert plan.located is not None
    try:
        shape = estimate.shape(plan.raw)
    except PlanError as error:
        raise QuantizeError(f"{plan.config.source.model}: {error}") from None
    device, why = vram.choose(plan.config.device, probes)
    plan.notes.append(f"device: {device.name} ({why})")
    plan.device = device
    plan.need = estimate.need(shape, plan.config, device.kind, plan.clip_tokens)
    here = preflight.machine(plan.models)
    plan.checks += preflight.room(plan.need, here, plan.config, plan.models, plan.located)
    if plan.need.vram is not None:
        minutes = "as long as this job takes, and a start"
        check, plan.device = vram.judge(
            vram.freed(device) if ask.stop_engine else device, plan.need.vram, plan.config.memory.vram_gib, minutes
        )
        plan.checks.append(check)
        plan.inputs_on_host = not plan.need.inputs_fit(plan.device.limit or 0)


def _calibrate(plan: Plan, tokenizer: calibration.Tokenizer, texts: datasets.Found) -> None:
    kind, found = texts.read()
    vocab = int(plan.raw["vocab_size"])
    plan.prepared = calibration.prepare(plan.config.calibration, found, kind, tokenizer, vocab=vocab)
    plan.end_of_turn = tokenizer.end_of_turn()
    told: list[str] = []
    calibration.describe(plan.prepared, told.append)
    plan.notes += told
    tokens = plan.prepared.calibration.tokens
    plan.checks.append(ok("calibration.source", "enough texts", f"{tokens:,} tokens, and the held-out ones"))


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantizeError(
            f"{folder} cannot be made ({error.strerror}): set XDG_CACHE_HOME to a writable place"
        ) from None
    return folder


def summary(plan: Plan) -> list[str]:
    """What the run takes, as estimated."""
    if plan.need is None:
        return []
    need = plan.need
    card = "" if need.vram is None else f", {gib(need.vram)} of the card"
    return [
        f"{gib(need.weights_before)} of weights become {gib(need.weights_after)}",
        f"estimated peak: {gib(need.ram)} of memory{card}; {gib(need.disk)} of disk",
    ]


def quiet() -> dict[str, str]:
    """To be set before the first library is imported. Their bars and warnings: the job says more than they do. How
    threads wait: spinning for one that a busy machine does not run took 142 s where sleeping took 11 s."""
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "LLM_COMPRESSOR_LOG_DISABLED": "true",
        "COMPRESSED_TENSORS_LOG_DISABLED": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }


def environment(device: vram.Device) -> dict[str, str]:
    """To be set before torch first speaks to a card: one card, no growth by fragments."""
    if device.card is None:
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or str(device.card.index),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
