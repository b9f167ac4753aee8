"""Shapes and weights: what config.json says, and what is refused with a reason."""

import json
from typing import Any

import pytest

from scripts.planner import PlanError
from scripts.planner.catalog import SHAPES
from scripts.planner.model import parse_model
from scripts.planner.weights import compute_weights


def shape(name: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())
    return {key: value for key, value in (found | changes).items() if value is not ...}


def weight_bytes(name: str, **changes: Any) -> int:
    return compute_weights(parse_model(shape(name, **changes), name)).total


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360), ("smollm2-135m-instruct", 134_515_008)],
)
def test_bf16_weights_are_two_bytes_for_each_published_parameter(name: str, parameters: int) -> None:
    assert weight_bytes(name) == 2 * parameters


def test_awq_weights_match_the_size_of_the_published_checkpoint() -> None:
    """AWQ g128 with fp16 embeddings and head is 5.73 GB."""
    assert weight_bytes("llama3-8b-awq") == pytest.approx(5.73e9, rel=1e-3)


def test_awq_counts_scales_and_zero_points() -> None:
    """A group of 32 has four times the scales and zero points of one of 128, on every linear weight."""
    linear = (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) * 32
    quant = shape("llama3-8b-awq")["quantization_config"]
    fine = weight_bytes("llama3-8b-awq", quantization_config=quant | {"group_size": 32})
    assert fine - weight_bytes("llama3-8b-awq") == linear * (4 - 1) // 128 * 5 // 2


def test_a_tied_head_is_held_once() -> None:
    untied, tied = weight_bytes("llama3-8b"), weight_bytes("llama3-8b", tie_word_embeddings=True)
    assert untied - tied == 128256 * 4096 * 2


def test_biases_of_qwen2_are_counted() -> None:
    qwen2 = weight_bytes("llama3-8b", architectures=["Qwen2ForCausalLM"])
    assert qwen2 - weight_bytes("llama3-8b") == (4096 + 1024 + 1024) * 32 * 2


def test_every_expert_of_a_mixture_is_held() -> None:
    """Mixtral 8x7B has 46.7 billion parameters, not 8 x 7."""
    mixtral = shape(
        "llama3-8b", architectures=["MixtralForCausalLM"], vocab_size=32000, num_local_experts=8, num_experts_per_tok=2
    )
    total = compute_weights(parse_model(mixtral, "mixtral")).total
    assert total / 2 == pytest.approx(46.7e9, rel=1e-3)


@pytest.mark.parametrize(
    ("quant", "bytes_a_weight"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0 + 4 / (128 * 128)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.5 + 2 / 128),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True},
                    }
                },
                "ignore": ["lm_head"],
            },
            0.5 + 2 / 128,
        ),
    ],
)
def test_other_schemes_are_sized_by_bits_and_scales(quant: dict[str, Any], bytes_a_weight: float) -> None:
    linear = (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) * 32
    rest = weight_bytes("llama3-8b") - 2 * linear
    assert weight_bytes("llama3-8b", quantization_config=quant) - rest == pytest.approx(
        linear * bytes_a_weight, rel=2e-3
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "not known to the planner"),
        ({"architectures": []}, "should name one architecture"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "multi-head latent attention"),
        ({"vision_config": {}}, "multimodal"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": -1}, "above 0"),
        ({"num_hidden_layers": 32.5}, "whole number"),
        ({"num_attention_heads": True}, "whole number"),
        ({"num_key_value_heads": 5}, "cannot share"),
        ({"num_attention_heads": 8192}, "head dimension of 0"),
        ({"num_hidden_layers": 10**9}, "not the depth of any model"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"quantization_config": "awq"}, "not an object"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm' is not known"),
        ({"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 128}}, "4 bits only"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 96}}, "does not divide"),
        (
            {
                "quantization_config": {
                    "quant_method": "awq",
                    "bits": 4,
                    "group_size": 128,
                    "modules_to_not_convert": ["x"],
                }
            },
            "leaves 1 linear layers unquantized",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}},
            "2 config",
        ),
    ],
)
def test_what_cannot_be_sized_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        weight_bytes("llama3-8b", **changes)


def test_a_partly_dense_mixture_is_refused() -> None:
    partly = {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}
    with pytest.raises(PlanError, match="all-or-none"):
        parse_model(shape("llama3-8b", **partly), "x")


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, {None: 32}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {None: 32}),
        ({"sliding_window": 4096}, {4096: 32}),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 4096}, {4096: 16, None: 16}),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 1024}, {1024: 27, None: 5}),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]}, {8: 31, None: 1}),
    ],
)
def test_which_layers_slide(changes: dict[str, Any], windows: dict[int | None, int]) -> None:
    model = parse_model(shape("llama3-8b", **changes), "x")
    assert {window: model.windows.count(window) for window in set(model.windows)} == windows


def test_layer_types_that_do_not_cover_the_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="layer_types"):
        parse_model(shape("llama3-8b", sliding_window=8, layer_types=["full_attention"]), "x")


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 8192),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"type": "linear", "factor": 4.0}, 32768),
        ({"rope_type": "dynamic", "factor": 2.0}, 16384),
    ],
)
def test_the_context_limit_follows_the_rope_scaling(rope: dict[str, Any] | None, limit: int) -> None:
    assert parse_model(shape("llama3-8b", rope_scaling=rope), "x").max_positions == limit


def test_every_shape_that_ships_can_be_planned() -> None:
    for path in SHAPES.glob("*.json"):
        assert parse_model(json.loads(path.read_text()), path.stem).layers > 0, path.name


JUNK: tuple[Any, ...] = (
    None,
    -1,
    0,
    10**30,
    1.5,
    True,
    "x",
    "NaN",
    [],
    [1],
    {},
    {"a": 1},
    {"rope_type": "linear", "factor": "x"},
)
QUANT: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": None},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}},
        "ignore": ["lm_head"],
    },
}


@pytest.mark.parametrize("key", [*shape("llama3-8b"), "head_dim", "sliding_window", "layer_types", "rope_scaling"])
@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_a_config_is_sized_or_refused_but_never_crashes(key: str, junk: Any) -> None:
    _plan_or_refuse(shape("llama3-8b", **({"sliding_window": 64} | {key: junk})))


@pytest.mark.parametrize("method", list(QUANT))
@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_a_quantization_is_sized_or_refused_but_never_crashes(method: str, junk: Any) -> None:
    for key in QUANT[method]:
        _plan_or_refuse(shape("llama3-8b", quantization_config=QUANT[method] | {key: junk}))


def _plan_or_refuse(config: dict[str, Any]) -> None:
    try:
        assert compute_weights(parse_model(config, "x")).total > 0
    except PlanError as error:
        assert str(error)
