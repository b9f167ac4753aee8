"""The model card: README.md of an artifact, for whoever finds the directory without us."""

from __future__ import annotations

from scripts.planner.numbers import gib
from scripts.quantization.manifest import Manifest
from scripts.quantization.progress import human


def write(made: Manifest, licence: str) -> str:
    """Markdown; every figure is the manifest's. licence: the original's, as its repository names it."""
    run, told = made.run, made.calibration
    weights = made.config["weights"]
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    peak = "" if run.peak_gpu_bytes is None else f", {gib(run.peak_gpu_bytes)} of the card"
    errors = [layer.error for layer in run.layers if layer.error is not None]
    worst = f"\nLargest output error of a layer: {max(errors):.2%} (mean square, relative).\n" if errors else ""
    return f"""---
base_model: {made.source.model}
license: {licence}
quantized_by: {made.producer}
---
# {made.name}, 4 bit

{made.source.model} at revision {made.source.revision} ({made.source.architecture}), quantized by {made.producer}.
Linear layers: {weights["w_bit"]} bits in groups of {weights["group_size"]}, with zero points. The rest: the original's.

Nothing here says how good it is: manifest.json holds the gate's verdict, once the gate has judged.

| | |
|---|---|
| digest | {made.digest} |
| weights | {gib(made.weight_bytes)} |
| calibration | {told.tokens:,} tokens of {told.source}, seed {told.seed}, through the chat template |
| held out for the gate | {made.held_out.tokens:,} tokens (heldout.jsonl) |
| made | {run.finished_at} on {run.device_name}, in {human(sum(run.stages_s.values()))} |
| peak memory | {gib(run.peak_ram_bytes)} of the host{peak} |
| versions | {versions} |
{worst}
Serve it: `vllm serve DIRECTORY`, which finds out by itself that this is {made.quantization["quant_method"]}.
The original's licence goes on applying.
"""
