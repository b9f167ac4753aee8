"""The numbers of a model that decide its memory, read from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.planner import PlanError
from scripts.planner.numbers import positive_float, positive_int
from scripts.planner.quant import Quant, parse_quant


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts feed-forward: count experts, of which top_k run for each token."""

    count: int
    top_k: int
    width: int


@dataclass(frozen=True)
class Model:
    """windows holds one entry a layer: the sliding window in tokens, or None for full attention."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    dtype: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    norms_per_layer: int
    windows: tuple[int | None, ...]
    experts: Experts | None = None
    quant: Quant | None = None

    @property
    def padded_vocab(self) -> int:
        """vLLM pads the vocabulary to a multiple of 64."""
        return -(-self.vocab // 64) * 64


@dataclass(frozen=True)
class _Traits:
    """What an architecture's code fixes and its config.json does not say."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    window_period: int = 0  # every n-th layer attends to everything, the others through the window
    expert_keys: tuple[str, str] | None = None  # (number of experts, width of one)


_KNOWN = {
    "LlamaForCausalLM": _Traits(),
    "MistralForCausalLM": _Traits(),
    "Phi3ForCausalLM": _Traits(),
    "Qwen2ForCausalLM": _Traits(qkv_bias=True),
    "Qwen3ForCausalLM": _Traits(qk_norm=True),
    "Gemma2ForCausalLM": _Traits(norms=4, window_period=2),
    "Gemma3ForCausalLM": _Traits(norms=4, qk_norm=True, window_period=6),
    "MixtralForCausalLM": _Traits(expert_keys=("num_local_experts", "intermediate_size")),
    "Qwen3MoeForCausalLM": _Traits(qk_norm=True, expert_keys=("num_experts", "moe_intermediate_size")),
}

_BYTES = {"bfloat16": 2, "float16": 2}
MAX_LAYERS = 1000


def dtype_bytes(dtype: str) -> int:
    return _BYTES[dtype]


def parse_model(config: Mapping[str, Any], name: str) -> Model:
    """config: a config.json. Raises PlanError naming the key for whatever it cannot size."""
    architecture = _architecture(config)
    traits = _KNOWN[architecture]
    layers = _count(config, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise PlanError(f"config.json: num_hidden_layers {layers} is not the depth of any model")
    hidden = _count(config, "hidden_size")
    heads = _count(config, "num_attention_heads")
    head_dim = _count(config, "head_dim") if config.get("head_dim") else hidden // heads
    kv_heads = _count(config, "num_key_value_heads") if "num_key_value_heads" in config else heads
    if head_dim < 1:
        raise PlanError(f"config.json: {heads} heads of {hidden} hidden channels have a head dimension of 0")
    if heads % kv_heads:
        raise PlanError(f"config.json: {heads} attention heads cannot share {kv_heads} KV heads")
    bias = bool(config.get("attention_bias", False))
    return Model(
        name=name,
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        max_positions=_max_positions(config),
        dtype=_dtype(config),
        tied=bool(config.get("tie_word_embeddings", architecture.startswith("Gemma"))),
        qkv_bias=traits.qkv_bias or bias,
        out_bias=bias,
        qk_norm=traits.qk_norm,
        norms_per_layer=traits.norms,
        windows=_windows(config, traits, layers),
        experts=_experts(config, traits),
        quant=parse_quant(config),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise PlanError(f"config.json: architectures should name one architecture, found {names!r}")
    name: str = names[0]
    if "kv_lora_rank" in config:
        raise PlanError(
            f"{name} uses multi-head latent attention: its cache and its prefill workspace follow rules of their "
            "own that the planner does not model, so it gives no figure"
        )
    if "vision_config" in config or "audio_config" in config:
        raise PlanError(
            f"{name} is multimodal: the encoder's peak depends on the largest image or clip; the planner does not "
            "model it, so it gives no figure"
        )
    if name not in _KNOWN:
        raise PlanError(f"architecture {name!r} is not known to the planner (known: {', '.join(sorted(_KNOWN))})")
    return name


def _count(config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise PlanError(f"config.json: {key} is missing")
    return positive_int(config[key], f"config.json: {key}")


def _dtype(config: Mapping[str, Any]) -> str:
    """float32 checkpoints are served in two bytes: the engine's `auto` downcasts them."""
    found = config.get("dtype", config.get("torch_dtype"))
    if found in (None, "float32"):
        return "bfloat16"
    if not isinstance(found, str) or found not in _BYTES:
        raise PlanError(f"config.json: dtype {found!r} is not known to the planner (known: bfloat16, float16)")
    return found


def _max_positions(config: Mapping[str, Any]) -> int:
    """The longest context the engine accepts without an override; linear and dynamic scaling multiply it."""
    limit = _count(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return limit
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "longrope":
        return positive_int(config.get("original_max_position_embeddings", limit), "original_max_position_embeddings")
    if kind in ("linear", "dynamic"):
        return int(limit * positive_float(rope.get("factor") or 1.0, "config.json: the rope scaling's factor"))
    return limit


def _windows(config: Mapping[str, Any], traits: _Traits, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    width = positive_int(window, "config.json: sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        wanted = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in wanted for kind in kinds):
            raise PlanError(f"config.json: layer_types should name {' or '.join(wanted)} for each of {layers} layers")
        return tuple(width if kind == "sliding_attention" else None for kind in kinds)
    if "max_window_layers" in config and config.get("use_sliding_window"):
        raise PlanError("config.json: max_window_layers without layer_types: which layers slide is not stated")
    if traits.window_period:
        return tuple(None if (i + 1) % traits.window_period == 0 else width for i in range(layers))
    return (width,) * layers


def _experts(config: Mapping[str, Any], traits: _Traits) -> Experts | None:
    if traits.expert_keys is None:
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise PlanError("config.json: only some layers are mixtures of experts; the planner sizes all-or-none")
    count, width = traits.expert_keys
    return Experts(_count(config, count), _count(config, "num_experts_per_tok"), _count(config, width))
