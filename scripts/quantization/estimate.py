"""What a job will take of disk, host memory and the card, from the model's shape. Pure arithmetic, in bytes.

Checked against runs: docs/quantize.md says how far off they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scripts.planner.model import Model, parse_model
from scripts.planner.numbers import GIB, MIB
from scripts.planner.quant import Quant
from scripts.planner.weights import compute_weights
from scripts.quantization.config import Config

LIBRARIES = round(0.9 * GIB)  # torch, transformers and the producer, loaded
CUDA_HOST = 2 * GIB  # what CUDA's libraries and the driver keep in host memory
CONTEXT = round(0.6 * GIB)  # a CUDA context and cuBLAS's workspace on the card
CLIP_ROWS = 256  # output channels that the clip search treats at once
CLIP_COPIES = 2  # its products of tokens and weights that are alive together


@dataclass(frozen=True)
class Need:
    """Bytes. vram is None for a job on the CPU. inputs: a decoder layer's, of all its linear layers."""

    disk: int
    ram: int
    vram: int | None
    weights_before: int
    weights_after: int
    inputs: int

    def inputs_fit(self, card: int) -> bool:
        """Whether the inputs, too, fit into `card` bytes, so that they need not wait in host memory."""
        return self.vram is not None and self.vram + self.inputs <= card


def shape(raw: Mapping[str, Any]) -> Model:
    """The model of a config.json. Raises PlanError."""
    return parse_model(raw, "source")


def widths(model: Model) -> dict[str, int]:
    """Input widths of the layers that are quantized: each must be a whole number of groups."""
    return {
        "hidden_size": model.hidden,
        "num_attention_heads x head_dim": model.heads * model.head_dim,
        "intermediate_size": model.intermediate,
    }


def need(model: Model, config: Config, device: str, clip_tokens: int) -> Need:
    """For the autoawq producer; llm-compressor takes less of the card and as much of the host."""
    group = config.weights.group_size
    before = compute_weights(model)
    after = compute_weights(replace(model, quant=Quant("awq", 4, group, zeros=True))).total
    calibration = config.calibration
    tokens = calibration.blocks * calibration.block_tokens
    width = max(model.intermediate, model.heads * model.head_dim)
    # Inputs of every linear layer of one decoder layer: q, k, v, o, gate and up at the hidden width, down at the
    # intermediate one.
    inputs = tokens * 2 * (6 * model.hidden + model.intermediate)
    activations = inputs + tokens * 2 * (width + 2 * model.hidden)
    ram = before.total + activations + LIBRARIES
    if device == "cpu":
        layer = before.linears // model.layers
        return Need(_disk(after), ram + 3 * layer + _clip(width, clip_tokens), None, before.total, after, inputs)
    layer = before.linears // model.layers
    embedding = before.embeddings if model.tied else before.embeddings // 2
    searched = tokens * 2 * (width + model.hidden)
    vram = CONTEXT + embedding + 3 * layer + searched + _clip(width, clip_tokens) + 512 * MIB
    return Need(_disk(after), ram + CUDA_HOST, vram, before.total, after, inputs)


def _clip(width: int, tokens: int) -> int:
    return CLIP_COPIES * CLIP_ROWS * width * tokens * 2


def _disk(after: int) -> int:
    return round(after * 1.05) + 64 * MIB
