"""A model of a planner's shape with random weights: for measuring time and memory where the real one is not to be had.

    python -m scripts.quantization.random_model SHAPE OUT --tokenizer DIR [--layers N] [--seed N]

SHAPE names a file of scripts/planner/shapes; the tokenizer and chat template of DIR are used, with the shape's own
vocabulary size. Nothing that it says means anything, and no quality can be measured on it.
Needs torch and safetensors. Exit codes: 0 made, 1 refused, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.planner import PlanError
from scripts.planner.catalog import SHAPES
from scripts.planner.checkpoint import INDEX, read_json_object
from scripts.planner.model import Model, parse_model

_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tensors(model: Model) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes, shard by shard: what is outside the layers, then one layer each."""
    outside: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (model.vocab, model.hidden))]
    if not model.tied:
        outside.append(("lm_head.weight", (model.vocab, model.hidden)))
    yield [*outside, ("model.norm.weight", (model.hidden,))]
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for index in range(model.layers):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (query, model.hidden),
            "self_attn.k_proj": (key, model.hidden),
            "self_attn.v_proj": (key, model.hidden),
            "self_attn.o_proj": (model.hidden, query),
            "mlp.gate_proj": (model.intermediate, model.hidden),
            "mlp.up_proj": (model.intermediate, model.hidden),
            "mlp.down_proj": (model.hidden, model.intermediate),
            "input_layernorm": (model.hidden,),
            "post_attention_layernorm": (model.hidden,),
        }
        if model.qk_norm:
            layer |= {"self_attn.q_norm": (model.head_dim,), "self_attn.k_norm": (model.head_dim,)}
        yield [(f"model.layers.{index}.{name}.weight", shape) for name, shape in layer.items()]


def write(shape: Path, out: Path, tokenizer: Path, layers: int | None, seed: int) -> int:
    """Returns the bytes of weights. Raises PlanError, OSError."""
    import torch
    from safetensors.torch import save_file

    raw: dict[str, Any] = read_json_object(shape)
    if layers:
        raw["num_hidden_layers"] = layers
    model = parse_model(raw, shape.stem)
    if model.architecture not in _TYPES or model.quant is not None:
        raise PlanError(f"{shape.stem}: random weights are made for {', '.join(_TYPES)} in 16 bits only")
    out.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a card draws 8 billion numbers in seconds
    generator = torch.Generator(device).manual_seed(seed)
    weight_map, total = {}, 0
    count = model.layers + 1
    for index, shard in enumerate(tensors(model), 1):
        name = f"model-{index:05}-of-{count:05}.safetensors"
        made = {}
        for key, dims in shard:
            if len(dims) == 1:
                made[key] = torch.ones(dims, dtype=torch.bfloat16)
            else:
                # As large as keeps a layer's output about as large as its input.
                drawn = torch.randn(dims, generator=generator, dtype=torch.bfloat16, device=device)
                made[key] = drawn.mul_(1 / math.sqrt(dims[1])).cpu()
            weight_map[key] = name
            total += made[key].numel() * 2
        save_file(made, out / name, metadata={"format": "pt"})
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(index_file), encoding="utf-8")
    config = {"rms_norm_eps": 1e-5, "hidden_act": "silu"} | raw | {"model_type": _TYPES[model.architecture]}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in _TOKENIZER:
        if (tokenizer / file).is_file():
            shutil.copyfile(tokenizer / file, out / file)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.quantization.random_model", description="A model of a known shape with random weights."
    )
    parser.add_argument("shape", help=f"one of {', '.join(sorted(path.stem for path in SHAPES.glob('*.json')))}")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory with tokenizer and chat template")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        total = write(SHAPES / f"{args.shape}.json", args.out, args.tokenizer, args.layers, args.seed)
    except (PlanError, OSError) as error:
        print(f"random model: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {total / 2**30:.2f} GiB of random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
