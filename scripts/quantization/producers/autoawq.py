"""AutoAWQ (GEMM layout), driven through its public interface; its two faults are mended in a subclass.

On a model that lies in CPU memory its scale search keeps the original weights by reference and then scales them in
place, so each of the 20 candidates is tried on top of the ones before and the result is garbage. Here the search gets
copies. And it never says what it does: here each layer is reported, with the error that quantizing it made.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch

from scripts.quantization.producers import Work
from scripts.quantization.progress import Progress

with warnings.catch_warnings(record=True):  # it says on import that it is archived, whatever the filters are
    from awq import AutoAWQForCausalLM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.module import set_op_by_name
    from awq.utils.packing_utils import dequantize_gemm

_CHUNK_BYTES = 256 << 20  # of what it sums at once; its own default is four times that


def produce(work: Work, progress: Progress) -> dict[str, Any]:
    """`scripts.quantization.producers.Producer`. The weights are loaded into host memory; layers visit the card."""
    torch.manual_seed(work.config.calibration.seed)
    with progress.stage("load"):
        model = AutoAWQForCausalLM.from_pretrained(
            str(work.source), torch_dtype="auto", trust_remote_code=False, device_map="cpu"
        )
    weights = work.config.weights
    wanted = {
        "w_bit": weights.w_bit,
        "q_group_size": weights.group_size,
        "zero_point": weights.zero_point,
        "version": weights.version,
    }
    with progress.stage("quantize"):
        model.quantize(
            None,  # the blocks are tokens already
            quant_config=wanted,
            calib_data=[list(block) for block in work.blocks],
            max_calib_samples=len(work.blocks),
            max_calib_seq_len=len(work.blocks[0]),
            n_parallel_calib_samples=work.config.memory.parallel_blocks,
            max_chunk_memory=_CHUNK_BYTES,
            quantizer_cls=_quantizer(work, progress),
        )
    with progress.stage("save"):
        _save(model, work.out, work.config.shard_gib)
    found: dict[str, Any] = model.quant_config.to_transformers_dict()
    return found


def _save(model: Any, out: Path, shard_gib: float) -> None:
    model.model.generation_config.do_sample = True  # what it sets itself; the job writes the original's file afterwards
    model.save_quantized(str(out), shard_size=f"{round(shard_gib * 1024)}MB")


def _unpacked(packed: Any, dtype: Any) -> Any:
    """The weights that the engine will compute with, as a plain linear layer holds them."""
    found = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, packed.w_bit, packed.group_size)
    return found.t().contiguous().to(dtype)


def _quantizer(work: Work, progress: Progress) -> type[Any]:
    """A subclass for one job: `quantize` takes a class, and makes the object itself."""

    class Reporting(AwqQuantizer):  # type: ignore[misc]
        """Reports each layer, bounds the clip search, and keeps on the device what the search asks for again."""

        inps: Any  # [blocks, block tokens, hidden]: what goes into the next layer

        def _get_input_feat(self, layer: Any, named_linears: Any) -> Any:
            # The first thing done to a layer, while its weights are still the original's.
            progress.layer_begins()
            self._one_in = self.inps[:1].clone()
            if work.inputs_on_host or work.stock:
                found = super()._get_input_feat(layer, named_linears)
            else:
                found = self._inputs(layer, named_linears)
            self._one_out = self.inps[:1].float()
            return found

        def _inputs(self, layer: Any, named_linears: Any) -> dict[str, Any]:
            """What each linear layer is given, [blocks, block tokens, width], on the device, not in host memory.

            One tensor for each of them, although some share theirs: each is scaled in place later.
            """
            parts: dict[str, list[Any]] = {name: [] for name in named_linears}

            def keep(name: str, module: Any, given: Any) -> None:
                parts[name].append(given[0].detach())

            hooks = [
                linear.register_forward_pre_hook(functools.partial(keep, name))
                for name, linear in named_linears.items()
            ]
            self.inps = self._module_forward(self.inps, layer, self._sanitize_kwargs(self.module_kwargs, layer))
            for hook in hooks:
                hook.remove()
            return {name: torch.cat(parts.pop(name)) for name in named_linears}

        def _apply_quant(self, module: Any, named_linears: Any) -> None:
            super()._apply_quant(module, named_linears)  # the last thing done to it
            error = self._error(module, named_linears)
            module.cpu()  # it is not needed any more, and on a card all the layers before it would pile up
            progress.layer_ends(work.layers, error)

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def _error(self, module: Any, named_linears: Any) -> float:
            """The layer's output with the packed weights against the original's, on the first block.

            The weights are unpacked into plain linear layers for it, so that no kernel has to be there.
            """
            packed = {}
            for name, linear in named_linears.items():
                packed[name] = module.get_submodule(name)
                linear.weight.data = _unpacked(packed[name], self._one_in.dtype)
                set_op_by_name(module, name, linear)
            try:
                module.to(work.device).to(self._one_in.dtype)
                given = self._one_in.to(work.device)
                out = module(given, **self._sanitize_kwargs(self.module_kwargs, module))
                out = (out[0] if isinstance(out, tuple) else out).float()
                truth = self._one_out.to(out.device)
                return float((out - truth).pow(2).mean() / truth.pow(2).mean().clamp_min(1e-12))
            finally:
                for name, linear in packed.items():
                    set_op_by_name(module, name, linear)

        def _module_forward(self, x: Any, module: Any, module_kwargs: Any) -> Any:
            """In parts, as the parent's, but each part's output stays on the device.

            The parent's goes to the host, where the losses of the scale search are then computed: 70 s a layer of an
            8B on one H200, with the card idle.
            """
            parts = []
            for part in torch.split(x, self.n_parallel_calib_samples):
                out = module(part, **module_kwargs)
                parts.append(out[0] if isinstance(out, tuple) else out)
            return torch.cat(parts)

        def _compute_best_clip(self, w: Any, input_feat: Any, **search: Any) -> Any:
            return super()._compute_best_clip(w, input_feat, **search | {"n_sample_token": work.clip_tokens})

    class Mended(Reporting):
        """Lets the scale search restore true originals, from copies on the device."""

        def _compute_best_scale(
            self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, *more: Any, **named: Any
        ) -> Any:
            present = module2inspect.state_dict
            copies = {name: tensor.clone() for name, tensor in present().items()}

            @torch.no_grad()  # type: ignore[untyped-decorator]
            def restore(nothing: dict[str, Any]) -> None:
                for name, tensor in present().items():
                    tensor.copy_(copies[name])

            # These shadow the methods on this one object, for the length of the search. The parent's own would send the
            # originals to the host once and fetch them from there for each candidate.
            module2inspect.state_dict, module2inspect.load_state_dict = dict, restore
            try:
                return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *more, **named)
            finally:
                del module2inspect.state_dict, module2inspect.load_state_dict

    return Reporting if work.stock else Mended
