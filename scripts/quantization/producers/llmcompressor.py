"""llm-compressor: AWQ scales, then 4-bit weights with zero points in groups, as compressed-tensors (W4A16_ASYM)."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from scripts.quantization.producers import Work
from scripts.quantization.progress import Progress
from scripts.quantization.source import read_json


def produce(work: Work, progress: Progress) -> dict[str, Any]:
    """`scripts.quantization.producers.Producer`. Its own searches choose scales only: it has no clip search."""
    torch.manual_seed(work.config.calibration.seed)
    with progress.stage("load"):
        model = AutoModelForCausalLM.from_pretrained(
            work.source, dtype="auto", local_files_only=True, trust_remote_code=False, device_map="cpu"
        )
    weights = QuantizationArgs(
        num_bits=work.config.weights.w_bit,
        type="int",
        symmetric=False,
        strategy="group",
        group_size=work.config.weights.group_size,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    recipe = [
        _awq(work, progress),
        QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
    ]
    with progress.stage("quantize"):
        oneshot(
            model=model,
            dataset=_loader(work),
            processor=object(),  # asked for in vain: the blocks are tokens already
            recipe=recipe,
            num_calibration_samples=len(work.blocks),
            max_seq_length=len(work.blocks[0]),
            pipeline="sequential",
        )
    with progress.stage("save"):
        model.save_pretrained(work.out, save_compressed=True, max_shard_size=f"{round(work.config.shard_gib * 1024)}MB")
    # Only the saved copy of the configuration has it.
    found: dict[str, Any] = read_json(work.out / "config.json").get("quantization_config", {})
    return found


def _loader(work: Work) -> Any:
    """Batches of whole blocks in their order."""
    blocks = torch.tensor([list(block) for block in work.blocks])
    batches = [{"input_ids": batch} for batch in blocks.split(work.config.memory.parallel_blocks)]
    return DataLoader(batches, batch_size=None)


def _awq(work: Work, progress: Progress) -> Any:
    class Reporting(AWQModifier):  # type: ignore[misc]
        """Reports each layer. On a CPU caches are not pinned: that only serves copies to a card, and fails there."""

        def on_calibration_start(self, *args: Any, **kwargs: Any) -> Any:
            progress.layer_begins()
            return super().on_calibration_start(*args, **kwargs)

        def on_sequential_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
            found = super().on_sequential_epoch_end(*args, **kwargs)
            if len(progress.layers) < work.layers:  # what comes after the last layer is the head, not one of them
                progress.layer_ends(work.layers)
                progress.layer_begins()
            return found

        def _apply_smoothing(self, model: Any) -> None:
            if work.device == "cpu":
                for cache in self._parent_args_cache.values():
                    cache.pin_memory = lambda *_args, **_kwargs: None
            super()._apply_smoothing(model)

    Reporting.__name__ = AWQModifier.__name__  # the saved recipe names the class
    # Offloaded: the activations of all blocks would otherwise lie on the card at once.
    return Reporting(offload_device=torch.device("cpu"))
