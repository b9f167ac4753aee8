"""One layer of a toy model through a producer: whether library, torch and card work together, in seconds."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.quantization import QuantizeError, config, finish, producers
from scripts.quantization.progress import Progress

_WIDTH, _BLOCK = 128, 32


def run(wanted: config.Config, device: str, folder: Path | None = None) -> None:
    """Raises QuantizeError with the versions that do not work together. folder: where a few MB may be written."""
    produce = producers.load(wanted.producer)
    with tempfile.TemporaryDirectory(dir=folder, prefix="trial-") as place:
        source, out = Path(place) / "source", Path(place) / "out"
        out.mkdir()
        draw = random.Random(0)  # noqa: S311 - repeatable, not secret
        blocks = [[draw.randrange(256) for _ in range(_BLOCK)] for _ in range(2)]
        try:
            _toy(source)
            work = producers.Work(source, out, wanted, blocks, device, clip_tokens=32, layers=1)
            produce(work, Progress(out, lambda line: None))
            finish.check(out, producers.METHODS[wanted.producer])
        except Exception as error:  # whatever a library throws, its reason is the same: these do not fit together
            found = ", ".join(f"{name} {version}" for name, version in producers.versions(wanted.producer).items())
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise QuantizeError(f"{wanted.producer} fails on a one-layer trial with {found}: {reason}") from error


def _toy(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)


def everything(device: str, say: Callable[[str], None]) -> None:
    """Both producers. Raises QuantizeError."""
    for name in producers.METHODS:
        given = {"name": "trial", "source": {"model": "toy"}, "calibration": {"source": "toy"}, "producer": name}
        run(config.parse(given, "the trial"), device)
        found = ", ".join(f"{package} {version}" for package, version in producers.versions(name).items())
        say(f"{name} works on {device}: {found}")
