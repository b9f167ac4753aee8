"""How a checkpoint stores its linear layers, read from config.json's quantization_config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.planner import PlanError
from scripts.planner.numbers import cdiv, human_int, positive_int

_WHOLE_MODEL = "the planner sizes one scheme for all linear layers"


@dataclass(frozen=True)
class Quant:
    """One scheme for every linear layer; embeddings, head and norms keep the model's own dtype.

    method: the name config.json gives. bits: bits of a weight. group: input channels that share a scale (0 = one
    scale a whole output column, -1 = one a tensor). zeros: the scheme stores a zero point beside each scale.
    scale_bytes: bytes of one scale. block: (rows, columns) sharing one scale, for block-wise fp8. index: GPTQ's
    4-byte group index for each input channel.
    """

    method: str
    bits: int
    group: int
    zeros: bool = False
    scale_bytes: int = 2
    block: tuple[int, int] | None = None
    index: bool = False

    @property
    def label(self) -> str:
        grouping = f" group {self.group}" if self.group > 0 else ""
        return f"{self.method} {self.bits} bit{grouping}"

    def linear_bytes(self, inputs: int, outputs: int) -> int:
        """Bytes that one inputs x outputs matrix takes, its scales and zero points included."""
        weights = inputs * outputs * self.bits // 8
        if self.block is not None:
            scales = cdiv(outputs, self.block[0]) * cdiv(inputs, self.block[1])
        elif self.group > 0:
            if inputs % self.group:
                raise PlanError(
                    f"group size {self.group} does not divide an input width of {inputs}: "
                    "no engine can load such a checkpoint; quantize with a group that divides every width"
                )
            scales = inputs // self.group * outputs
        else:
            scales = outputs if self.group == 0 else 1
        zeros = scales * self.bits // 8 if self.zeros else 0
        return weights + scales * self.scale_bytes + zeros + (inputs * 4 if self.index else 0)


def parse_quant(config: Mapping[str, Any]) -> Quant | None:
    """None for a checkpoint that is not quantized. Raises PlanError for a scheme the planner cannot size."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise PlanError("config.json: quantization_config is not an object")
    method = str(found.get("quant_method", "")).lower()
    reader = _READERS.get(method)
    if reader is None:
        known = ", ".join(sorted(_READERS))
        raise PlanError(
            f"quantization method {method or 'unnamed'!r} is not known to the planner (known: {known}); " + _WHOLE_MODEL
        )
    return reader(found)


def _skips(found: Mapping[str, Any], key: str) -> None:
    """Layers left in full precision are only sized when they are the head, which always is."""
    names = found.get(key) or []
    if not isinstance(names, list):
        raise PlanError(f"quantization_config: {key} is not a list")
    others = [name for name in names if name not in ("lm_head", "re:.*lm_head")]
    if others:
        raise PlanError(
            f"the checkpoint leaves {len(others)} linear layers unquantized ({others[0]}, ...); " + _WHOLE_MODEL
        )


def _awq(found: Mapping[str, Any]) -> Quant:
    bits = positive_int(found.get("bits", found.get("w_bit")), "quantization_config.bits")
    if bits != 4:
        raise PlanError(f"AWQ with {bits} bits: vLLM loads AWQ with 4 bits only")
    group = human_int(found.get("group_size", found.get("q_group_size")), "quantization_config.group_size")
    _skips(found, "modules_to_not_convert")
    return Quant("awq", bits, max(group, 0), zeros=bool(found.get("zero_point", True)))


def _gptq(found: Mapping[str, Any]) -> Quant:
    bits = positive_int(found.get("bits"), "quantization_config.bits")
    group = human_int(found.get("group_size"), "quantization_config.group_size")
    return Quant("gptq", bits, max(group, 0), zeros=not found.get("sym", True), index=True)


def _fp8(found: Mapping[str, Any]) -> Quant:
    _skips(found, "modules_to_not_convert")
    block = found.get("weight_block_size")
    if block is None:
        return Quant("fp8", 8, -1, scale_bytes=4)
    if not isinstance(block, list) or len(block) != 2:
        raise PlanError("quantization_config: weight_block_size should be [rows, columns]")
    rows, columns = (positive_int(n, "quantization_config.weight_block_size") for n in block)
    return Quant("fp8", 8, -1, scale_bytes=4, block=(rows, columns))


def _compressed(found: Mapping[str, Any]) -> Quant:
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else 0
        raise PlanError(f"compressed-tensors with {count} config groups; " + _WHOLE_MODEL)
    _skips(found, "ignore")
    (group_config,) = groups.values()
    weights = group_config.get("weights") if isinstance(group_config, Mapping) else None
    if not isinstance(weights, Mapping):
        raise PlanError("compressed-tensors: the config group says nothing of its weights")
    bits = positive_int(weights.get("num_bits"), "config_groups.weights.num_bits")
    zeros = not weights.get("symmetric", True)
    match weights.get("strategy"):
        case "group":
            group = positive_int(weights.get("group_size"), "config_groups.weights.group_size")
        case "channel":
            group = 0
        case "tensor":
            group = -1
        case other:
            raise PlanError(f"compressed-tensors with the strategy {other!r}; " + _WHOLE_MODEL)
    return Quant("compressed-tensors", bits, group, zeros=zeros)


_READERS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
