"""The model's own tokenizer and chat template, through transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.quantization import QuantizeError


class HfTokenizer:
    """`scripts.quantization.calibration.Tokenizer` of a model directory; nothing is fetched, no code of it runs."""

    def __init__(self, directory: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from jinja2 import TemplateError
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()  # "longer than the model's maximum": it is cut into blocks afterwards
        self._refusals = (TemplateError, ValueError, TypeError, KeyError)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise QuantizeError(f"the tokenizer of {directory} cannot be loaded: {reason}") from None
        if not self._tokenizer.chat_template:
            raise QuantizeError(f"{directory} has no chat template: take an instruct model")

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False))
        except self._refusals as error:
            raise ValueError(str(error)) from error

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [int(token) for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def end_of_turn(self) -> int | None:
        turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zq"}]
        rendered = self.render(turn)
        after = self.encode(rendered[rendered.rindex("zq") + 2 :])
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        return next((token for token in after if token in special), None)
