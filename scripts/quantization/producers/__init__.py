"""One interface over the two libraries that quantize. Importing this imports neither: rules and versions only."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from scripts.quantization import QuantizeError
from scripts.quantization.config import Config
from scripts.quantization.progress import Progress

# Decoder families with plain linear layers that both libraries were seen to quantize with the pinned transformers.
# Mixtures of experts are left out: transformers 5 keeps all experts in one tensor, and neither takes that apart.
MODEL_TYPES = ("gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")
_PACKAGES = {
    "autoawq": ("autoawq", "torch", "transformers"),
    "llmcompressor": ("llmcompressor", "compressed-tensors", "torch", "transformers"),
}
METHODS = {"autoawq": "awq", "llmcompressor": "compressed-tensors"}


@dataclass(frozen=True)
class Work:
    """One job for a producer. out: an empty directory for shards and config.json. device: "cpu" or "cuda".

    inputs_on_host: a layer's inputs wait in host memory, since the card has no room for them; slower.
    stock: autoawq as its authors left it, whose search spoils the weights on a CPU; to prove that the gate sees it.
    """

    source: Path
    out: Path
    config: Config
    blocks: Sequence[Sequence[int]]
    device: str
    clip_tokens: int
    layers: int
    inputs_on_host: bool = False
    stock: bool = False


class Producer(Protocol):
    """Writes shards and a config.json with a quantization_config into work.out, and returns that quantization_config.

    Raises what its library raises; the job turns a lack of memory into its one line.
    """

    def __call__(self, work: Work, progress: Progress) -> dict[str, Any]: ...


def load(name: str) -> Producer:
    """Imports the library. Raises QuantizeError naming the versions found where that fails."""
    try:
        module = importlib.import_module(f"scripts.quantization.producers.{name}")
    except ImportError as error:
        found = ", ".join(f"{package} {version}" for package, version in versions(name).items())
        raise QuantizeError(
            f"{name} cannot be imported ({error}) with {found}: use the job's own environment "
            "(make .venv-quantize/.installed) or its image"
        ) from None
    producer: Producer = module.produce
    return producer


def versions(name: str) -> dict[str, str]:
    """What is installed of what decides the result; "none" for what is not."""
    found = {}
    for package in _PACKAGES[name]:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found
