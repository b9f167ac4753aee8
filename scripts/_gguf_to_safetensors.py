"""GGUF to a directory vLLM serves: run by scripts.model_fetch with the engine's python, which has torch.

    .venv-engine/bin/python scripts/_gguf_to_safetensors.py FILE.gguf OUT_DIR

Writes bfloat16 safetensors, config, generation config, tokenizer and chat template. Any error is a traceback and
exit code 1: the caller turns it into its one line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, out: Path) -> None:
    """Unpacks the quantized weights; the same input gives the same bytes."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its splitting rule ("smollm"): every digit stands alone. The reader knows only GPT-2's rule, which
    # ties a space to the digit behind it and so tokenizes "x  5" as the model never saw it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # Plain weights from here on: vLLM would look for a GGUF beside a config that still names one.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
