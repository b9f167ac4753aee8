"""A model directory is planned from what lies in it, and a damaged one is named."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts.planner import PlanError
from scripts.planner.catalog import find_model
from scripts.planner.checkpoint import INDEX, read_checkpoint, read_header

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 64,
}
LAYER = "model.layers.0."
TENSORS: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (64, 64),
    f"{LAYER}self_attn.q_proj.weight": (64, 64),
    f"{LAYER}self_attn.k_proj.weight": (32, 64),
    f"{LAYER}self_attn.v_proj.weight": (32, 64),
    f"{LAYER}self_attn.o_proj.weight": (64, 64),
    f"{LAYER}mlp.gate_proj.weight": (128, 64),
    f"{LAYER}mlp.up_proj.weight": (128, 64),
    f"{LAYER}mlp.down_proj.weight": (64, 128),
    f"{LAYER}input_layernorm.weight": (64,),
    f"{LAYER}post_attention_layernorm.weight": (64,),
    "model.norm.weight": (64,),
}
WIDTH = {"F32": 4, "BF16": 2}


def write_safetensors(path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dims in tensors.items():
        size = WIDTH[dtype]
        for n in dims:
            size *= n
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(at))


def model_dir(tmp_path: Path, dtype: str = "BF16", **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY | config))
    write_safetensors(tmp_path / "model.safetensors", TENSORS, dtype)
    return tmp_path


def sharded_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    names = list(TENSORS)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[:4], names[4:]), start=1):
        shard = f"model-0000{i}-of-00002.safetensors"
        write_safetensors(tmp_path / shard, {name: TENSORS[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_real_sizes_replace_computed_ones(tmp_path: Path) -> None:
    _, weights = find_model(str(model_dir(tmp_path)))
    assert weights.basis == "read"
    assert weights.size == sum(2 * (dims[0] * (dims[1] if len(dims) > 1 else 1)) for dims in TENSORS.values())


def test_float32_weights_are_counted_in_the_dtype_they_are_served_in(tmp_path: Path) -> None:
    _, narrow = find_model(str(model_dir(tmp_path)))
    _, wide = find_model(str(model_dir(tmp_path, dtype="F32", torch_dtype="float32")))
    assert wide.size == narrow.size


def test_a_head_saved_beside_a_tied_embedding_is_not_counted_twice(tmp_path: Path) -> None:
    _, once = find_model(str(model_dir(tmp_path)))
    write_safetensors(tmp_path / "model.safetensors", TENSORS | {"lm_head.weight": (64, 64)})
    _, twice = find_model(str(tmp_path))
    assert twice.size == once.size


def test_shards_are_added_up(tmp_path: Path) -> None:
    _, weights = find_model(str(sharded_dir(tmp_path)))
    assert "2 files" in weights.note


def test_config_alone_is_planned_from_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    _, weights = find_model(str(tmp_path))
    assert weights.basis == "computed"
    assert "no weights yet" in weights.note


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded_dir(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PlanError, match=r"1 of 2 shards are missing .model-00002-of-00002"):
        find_model(str(tmp_path))


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    sharded_dir(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(PlanError, match=r"index\.json does not exist"):
        find_model(str(tmp_path))


def test_a_tensor_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    sharded_dir(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(PlanError, match=r"1 tensors of the index are in no shard .model\.layers\.0\.extra"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_named_wherever_it_was_cut(tmp_path: Path, keep: int) -> None:
    path = model_dir(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PlanError, match=r"truncated|not a whole safetensors file"):
        find_model(str(tmp_path))


def test_trailing_bytes_are_refused_like_missing_ones(tmp_path: Path) -> None:
    path = model_dir(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(PlanError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize("header", [b"[1, 2]", b"{{", b'{"a": {"dtype": "BF16"}}', b'{"a": 1}'])
def test_a_header_that_makes_no_sense_is_named(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(PlanError, match="header cannot be read"):
        read_header(path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="not of one model"):
        find_model(str(model_dir(tmp_path, hidden_size=128)))


def test_other_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PlanError, match="no safetensors files"):
        read_checkpoint(tmp_path)


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is not a model directory"):
        find_model(str(tmp_path))


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match=r"config\.json cannot be read as JSON"):
        find_model(str(tmp_path))


def test_a_downloaded_model_is_preferred_to_the_shape_that_ships(tmp_path: Path) -> None:
    current = tmp_path / "llama3-8b" / "current"
    current.mkdir(parents=True)
    model_dir(current)
    model, weights = find_model("llama3-8b", {"MODELS_DIR": str(tmp_path)})
    assert (model.hidden, weights.basis) == (64, "read")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="llama3-8b-awq"):
        find_model("no-such-model", {"MODELS_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})
