"""A tiny random model with Llama 3's whole vocabulary, tokenizer and end tokens, as the hub's files are laid out.

    .venv-engine/bin/python -m tests.conformance.llama_checkpoint TOKENIZER_MODEL FOLDER

TOKENIZER_MODEL is Meta's tiktoken file; nothing of it is kept in this repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

BOS, END_OF_TEXT, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
# Llama 3's 256 special tokens in the order of their ids, which begin where the text's end (128000).
_NAMED = {0: BOS, 1: END_OF_TEXT, 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: EOT}
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""


def special_tokens() -> list[str]:
    """All 256; the nameless ones are numbered through."""
    unnamed = (number for number in range(256) if number not in _NAMED)
    reserved = {number: f"<|reserved_special_token_{place}|>" for place, number in enumerate(unnamed)}
    return [(_NAMED | reserved)[number] for number in range(256)]


def tokenizer(model: Path) -> PreTrainedTokenizerFast:
    fast = TikTokenConverter(vocab_file=str(model), extra_special_tokens=special_tokens()).converted()
    # A plain text gets one BOS in front; a chat's is in its template, and the engine adds none there.
    bos = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, fast.token_to_id(BOS))]
    )
    fast.post_processor = Sequence([ByteLevel(trim_offsets=False), bos])
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token=BOS, eos_token=EOT, chat_template=TEMPLATE)


def write(model: Path, folder: Path) -> None:
    made = tokenizer(model)
    assert len(made) == 128256, len(made)
    ends = made.convert_tokens_to_ids([END_OF_TEXT, EOT])
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=made.bos_token_id,
        eos_token_id=ends[0],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config)
    llama.generation_config = GenerationConfig(bos_token_id=made.bos_token_id, eos_token_id=ends)  # both, only here
    llama.save_pretrained(folder)
    made.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
