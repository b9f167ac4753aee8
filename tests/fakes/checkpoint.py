"""A small but complete model: two shards, an index, a tokenizer, a chat template."""

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
_LAYER = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors(part: int) -> dict[str, tuple[int, ...]]:
    """The weights of one of two shards: the embedding and a layer, or a layer and the last norm."""
    found: dict[str, tuple[int, ...]] = {f"model.layers.{part}.{name}.weight": shape for name, shape in _LAYER.items()}
    found |= {f"model.layers.{part}.{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found | ({"model.norm.weight": (64,)} if part else {"model.embed_tokens.weight": (256, 64)})


def shard(held: dict[str, tuple[int, ...]], seed: int = 0) -> bytes:
    """A safetensors file; its data repeats a pattern that no offset of 256 hides."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in held.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    pattern = bytes((seed + n * n) % 251 for n in range(251))
    return len(raw).to_bytes(8, "little") + raw + (pattern * (at // 251 + 1))[:at]


def files() -> dict[str, bytes]:
    """Name -> content."""
    weight_map = {name: SHARDS[part] for part in (0, 1) for name in tensors(part)}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}).encode(),
        SHARDS[0]: shard(tensors(0)),
        SHARDS[1]: shard(tensors(1), seed=7),
    }


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o644)
