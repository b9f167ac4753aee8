"""One run of the gate: original and artifact through the same engine, one after the other; then verdict and report.

The verdict goes into the artifact's manifest, bound to the hashes of its files; the report beside it as gate.html.
A run that ends early, however it ends, leaves the manifest as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.model_fetch_store import read_source, whole
from scripts.quantization import QuantizeError, report
from scripts.quantization.figures import Figures, compare
from scripts.quantization.gate import Judgement, Talk, judge, talk
from scripts.quantization.gate_config import GateConfig, SizeClass
from scripts.quantization.gate_engine import EngineError, Launcher, serving
from scripts.quantization.manifest import HELD_OUT, MANIFEST, Manifest, damage, hash_file, read, write
from scripts.quantization.promotion import choose, fingerprint
from scripts.quantization.scoring import Scorer, Scores, ScoringError, difference
from scripts.quantization.store import versions

REPORT = "gate.html"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What will be measured against what, and by which limits."""

    artifact: Path
    manifest: Manifest
    original: Path
    size: SizeClass
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """judgement, and all that it rests on; what could not be measured is None."""

    plan: Plan
    judgement: Judgement
    figures: Figures | None
    talks: tuple[Talk, ...]
    original: Scores | None
    artifact: Scores | None
    seconds: float


def plan(models: Path, name: str, wanted: str | None, original: Path | None, config: GateConfig) -> Plan:
    """Raises QuantizeError: no such version, files changed since they were written, no original to compare with."""
    version = choose(versions(models, name), wanted)
    if version.problem:
        raise QuantizeError(version.problem)
    manifest = version.manifest
    if manifest is None:
        raise QuantizeError(f"{name}/{version.version} was fetched as it is: there is nothing to compare it with")
    wrong = next(damage(version.path, manifest, hashes=True), None)
    if wrong is not None:
        raise QuantizeError(f"{name}/{version.version} is not as the job wrote it: {wrong}; quantize it again")
    weights = sum(file.bytes for file_name, file in manifest.source.files.items() if file_name.endswith(".safetensors"))
    return Plan(
        version.path,
        manifest,
        _original(models, manifest, original),
        config.size(weights),
        tuple(_held_out(version.path / HELD_OUT)),
    )


def _original(models: Path, manifest: Manifest, given: Path | None) -> Path:
    """The directory that the job read: the one given, its own, a fetched version, or the hub's cache."""
    source = manifest.source
    if given is not None:
        candidates = [given]
    elif (models / source.model).is_dir():  # a directory of MODELS_DIR, or an absolute path
        candidates = [models / source.model]
    else:
        candidates = [path.parent for path in models.glob("*/*/source.json") if _same_source(path.parent, manifest)]
        candidates += _cached(source.model, source.revision)
    why = ""
    for path in candidates:
        why = next(_unlike(path, manifest), "")
        if not why:
            return path.absolute()
    if why:
        raise QuantizeError(f"{candidates[-1]} is not the original that was quantized: {why}")
    raise QuantizeError(f"the original {source.model} is not on this machine: make gate ARGS='--original DIRECTORY'")


def _same_source(path: Path, manifest: Manifest) -> bool:
    found = read_source(path)
    return found is not None and found.revision == manifest.source.revision and whole(path)


def _cached(repo: str, revision: str) -> list[Path]:
    from huggingface_hub import snapshot_download  # late: it takes a second, and a directory needs none of it
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError, ValueError):
        return [Path(snapshot_download(repo, revision=revision, local_files_only=True))]
    return []


def _unlike(path: Path, manifest: Manifest) -> Any:
    for name, expected in manifest.source.files.items():
        file = path / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != expected.bytes or hash_file(file).sha256 != expected.sha256:
            yield f"{name} is another file"


def _held_out(path: Path) -> list[str]:
    try:
        return [str(json.loads(line)["text"]) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except FileNotFoundError:
        return []  # too little text is what an abstention is for
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise QuantizeError(f"{path} holds no texts, one JSON object a line: {error}") from None


def run(chosen: Plan, launcher: Launcher, config: GateConfig, say: Say) -> Result:
    """Serves the original, then the artifact. An engine that fails is an abstention with its cause."""
    began = time.monotonic()
    original: Scores | None = None
    try:
        original = measure(chosen.original, chosen.texts, None, launcher, config, _prefixed(say, "original"))
        artifact = measure(chosen.artifact, chosen.texts, original, launcher, config, _prefixed(say, "artifact"))
    except (EngineError, ScoringError) as error:
        trouble = f"{'original' if original is None else 'artifact'}: {error}"
        judgement = Judgement("ABSTAIN", (trouble,), ())
        return Result(chosen, judgement, None, (), original, None, time.monotonic() - began)
    return conclude(chosen, original, artifact, config, time.monotonic() - began)


def measure(
    model: Path, texts: Sequence[str], like: Scores | None, launcher: Launcher, config: GateConfig, say: Say
) -> Scores:
    """One side. `like`: the other side, whose tokens are scored. Raises EngineError, ScoringError."""
    windows = None if like is None else [window.tokens for window in like.windows]
    with serving(launcher, model, config.text.listed, config.engine, say) as url, Scorer(url, config) as scorer:
        return scorer.score(texts, windows, say)


def conclude(chosen: Plan, original: Scores, artifact: Scores, config: GateConfig, seconds: float) -> Result:
    """Pure."""
    scored = [(a.rest, b.rest) for a, b in zip(original.windows, artifact.windows, strict=True)]
    figures = compare([a for a, _ in scored], [b for _, b in scored]) if scored else None
    talks = tuple(talk(chat, a, b) for chat, a, b in zip(config.chats, original.answers, artifact.answers, strict=True))
    judgement = judge(config, chosen.size, figures, talks, difference(original, artifact))
    return Result(chosen, judgement, figures, talks, original, artifact, seconds)


def _prefixed(say: Say, what: str) -> Say:
    return lambda text: say(f"{what}: {text}")


def summary(result: Result) -> dict[str, Any]:
    """What the manifest keeps: JSON, without texts of the held-out part."""
    figures, limits = result.figures, result.plan.size.limits
    return {
        "verdict": result.judgement.verdict,
        "reasons": list(result.judgement.reasons),
        "notes": list(result.judgement.notes),
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(result.seconds, 1),
        "files_sha256": fingerprint(result.plan.manifest),
        "engine": None if result.artifact is None else result.artifact.engine,
        "size": result.plan.size.name,
        "limits": {**limits.model_dump(), "measured": result.plan.size.measured},
        "figures": None if figures is None else {**dataclasses.asdict(figures), "ppl_rise": figures.ppl_rise},
        "chats": [
            {
                "ask": found.chat.ask,
                "language": found.chat.language,
                "expect": list(found.chat.expect),
                "original": {**dataclasses.asdict(found.original), "wrong": found.original_wrong},
                "artifact": {**dataclasses.asdict(found.artifact), "wrong": found.artifact_wrong},
            }
            for found in result.talks
        ],
        "speed": {"original": _speed(result.original), "artifact": _speed(result.artifact)},
        "weight_bytes": {
            "original": _weights({name: file.bytes for name, file in result.plan.manifest.source.files.items()}),
            "artifact": result.plan.manifest.weight_bytes,
        },
    }


def _weights(files: Mapping[str, int]) -> int:
    return sum(size for name, size in files.items() if name.endswith(".safetensors"))


def _speed(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    return {
        "tokens_per_s_alone": round(scores.rate.alone, 1),
        "tokens_per_s_together": round(scores.rate.together, 1),
        "kv_tokens": scores.kv_tokens,
    }


def keep(result: Result, found: dict[str, Any]) -> bool:
    """Writes report and verdict; whether the verdict was kept. Raises QuantizeError, OSError.

    An abstention never replaces a verdict on the same files: that an engine did not start today says nothing new.
    """
    directory = result.plan.artifact
    now = read(directory)
    if fingerprint(now) != found["files_sha256"] or next(damage(directory, now), None) is not None:
        raise QuantizeError(f"{directory} was changed while it was measured: the verdict is thrown away")
    older = now.gate or {}
    same = older.get("files_sha256") == found["files_sha256"]
    if found["verdict"] == "ABSTAIN" and older.get("verdict") in ("PASS", "FAIL") and same:
        return False
    try:
        _write(directory / REPORT, report.html(now, found))
        write(directory, now.model_copy(update={"gate": found}))
    except OSError:
        for name in (f".{REPORT}.part", f".{MANIFEST}.part"):
            (directory / name).unlink(missing_ok=True)
        raise
    return True


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.chmod(0o644)
    part.replace(path)
