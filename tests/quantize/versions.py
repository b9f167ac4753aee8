"""Small versions on disk, with true manifests, for what needs no real model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.model_fetch import ENGINE_PYTHON
from scripts.quantization.manifest import (
    HELD_OUT,
    MANIFEST,
    Calibration,
    HeldOut,
    Layer,
    Manifest,
    Run,
    Source,
    hash_file,
    read,
    write,
)
from scripts.quantization.promotion import fingerprint

ROOT = Path(__file__).parents[2]
FIGURES = {
    "tokens": 8000,
    "windows": 16,
    "ppl_original": 8.2,
    "ppl_artifact": 9.5,
    "ppl_rise": 0.159,
    "kl_mean": 0.15,
    "kl_error": 0.01,
    "kl_median": 0.05,
    "kl_p99": 1.4,
    "top1": 0.82,
    "guessed": 0.001,
    "kl_histogram": [1000] * 8 + [0],
}


def make(models: Path, name: str, digest: str, weights: bytes = b"weights", verdict: str | None = "PASS") -> Path:
    """A quantized version of nothing real. `verdict` None: the gate has not judged it."""
    path = models / name / digest
    path.mkdir(parents=True)
    (path / "model-00001-of-00002.safetensors").write_bytes(weights)
    (path / "model-00002-of-00002.safetensors").write_bytes(weights[::-1])
    (path / "config.json").write_text("{}", encoding="utf-8")
    describe(path, Source(model="owner/model", revision="abc", architecture="LlamaForCausalLM", files={}), verdict)
    return path


def rounded(models: Path, name: str, digest: str, original: Path, texts: Sequence[str], noise: float = 0) -> Path:
    """A real version of a real model that no gate has judged, made in seconds (tests/quantize/rounding.py)."""
    path = models / name / digest
    arguments = [str(original), str(path), "--noise", str(noise)]
    subprocess.run([str(ENGINE_PYTHON), "-m", "tests.quantize.rounding", *arguments], check=True, cwd=ROOT)
    lines = (json.dumps({"id": str(index), "text": text}) for index, text in enumerate(texts))
    (path / HELD_OUT).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    files = {file.name: hash_file(file) for file in original.iterdir() if file.name != MANIFEST}
    describe(path, Source(model=str(original), revision="local", architecture="LlamaForCausalLM", files=files), None)
    return path


def describe(path: Path, source: Source, verdict: str | None) -> None:
    """Writes the manifest of what lies in a version's directory."""
    files = {file.name: hash_file(file) for file in path.iterdir() if file.name != MANIFEST}
    digest, name = path.name, path.parent.name
    manifest = Manifest(
        name=name,
        digest=digest,
        producer="autoawq",
        quantization={"bits": 4},
        config={},
        source=source,
        calibration=Calibration(
            source="a.jsonl",
            format="jsonl",
            seed=0,
            sha256="0",
            texts=1,
            texts_found=1,
            blocks=1,
            block_tokens=512,
            tokens=512,
        ),
        held_out=HeldOut(sha256="0", texts=1, tokens=512),
        versions={},
        run=Run(
            started_at="2030-01-01T00:00:00+00:00",
            finished_at="2030-01-01T00:10:00+00:00",
            stages_s={},
            device="cpu",
            device_name="a processor",
            peak_ram_bytes=1,
            peak_gpu_bytes=None,
            layers=(Layer(index=0, s=1.0, error=0.01), Layer(index=1, s=1.0)),
        ),
        files=files,
    )
    if verdict is not None:
        manifest = manifest.model_copy(update={"gate": gate(manifest, verdict)})
    write(path, manifest)


def rename(path: Path) -> None:
    """Makes a copy of a version one of its own: its manifest says what lies there, and no gate has judged it."""
    files = {file.name: hash_file(file) for file in path.iterdir() if file.name not in (MANIFEST, "gate.html")}
    write(path, read(path).model_copy(update={"digest": path.name, "files": files, "gate": None}))


def gate(manifest: Manifest, verdict: str) -> dict[str, Any]:
    reasons = [] if verdict == "PASS" else ["KL 0.900 nats a token; 0.220 is allowed"]
    side = {"tokens_per_s_alone": 30.0, "tokens_per_s_together": 200.0, "kv_tokens": 23296}
    return {
        "verdict": verdict,
        "reasons": reasons,
        "notes": [],
        "at": "2030-01-01T01:00:00+00:00",
        "seconds": 60.0,
        "files_sha256": fingerprint(manifest),
        "engine": "0.32.0",
        "size": "up to 1 GiB",
        "limits": {"ppl_rise_max": 0.25, "kl_mean_max": 0.22, "top1_min": 0.77, "measured": None},
        "figures": FIGURES,
        "chats": [],
        "speed": {"original": side, "artifact": side},
        "weight_bytes": {"original": 2, "artifact": 1},
    }


def judge_again(path: Path, verdict: str) -> None:
    found = read(path)
    write(path, found.model_copy(update={"gate": gate(found, verdict)}))


def serve(path: Path) -> None:
    """What a first promotion leaves, written by hand."""
    (path.parent / "current").symlink_to(path.name)


def links(home: Path) -> dict[str, str]:
    return {name: str((home / name).readlink()) for name in ("current", "previous") if (home / name).is_symlink()}
