"""The requests of a measurement, from a seed: lengths as in real chats, words that mean nothing.

What an engine does with a prompt depends on its length, not on its sense, so prompts are common English words, most of
them one token, of the lengths that real chats have (lengths.json, made by lengths.py). Every prompt starts with words
of its own, or the prefix cache would be measured by accident; `prefix` shares its beginnings on purpose.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.bench.plan import Workload

WORDS = tuple((Path(__file__).parent / "words.txt").read_text().split())
SPECIMEN_GROUPS = 8  # of `prefix`
PREFIX_TOKENS = 1024
SHORT_PROMPT, SHORT_ANSWER = (16, 48), 64
LONG_SHARE, LONG_ANSWER = 0.75, 128


@dataclass(frozen=True)
class Request:
    """A prompt and the exact length of its answer, in tokens (sent with ignore_eos)."""

    prompt: str
    output_tokens: int


@cache
def chat_lengths() -> tuple[tuple[int, int], ...]:
    """(prompt, answer) tokens of first turns of real chats."""
    pairs = json.loads((Path(__file__).parent / "lengths.json").read_text())
    return tuple((prompt, answer) for prompt, answer in pairs)


def requests(
    workload: Workload,
    count: int,
    *,
    seed: str,
    nonce: str = "",
    max_model_len: int,
    answer_tokens: int | None = None,
    texts: Sequence[Request] = (),
) -> list[Request]:
    """`count` requests that fit `max_model_len` (tokens). The same seed gives the same lengths, with the same nonce the
    same words, too: what was sent before must not be sent again, or the prefix cache answers.

    `texts` stand in for the chats' generated words, repeated where there are too few; the words in front keep each one
    new to the prefix cache.
    """
    dice, words = random.Random(f"{workload} {seed}"), random.Random(f"{workload} {seed} {nonce}")
    prefixes = [_words(words, min(PREFIX_TOKENS, max_model_len // 2)) for _ in range(SPECIMEN_GROUPS)]
    made = []
    for number in range(count):
        kind = workload
        if workload == "mixed":
            kind = dice.choices(("chat", "prefix", "long"), (7, 2, 1))[0]
        if kind == "short":
            prompt, answer = _words(words, dice.randint(*SHORT_PROMPT)), SHORT_ANSWER
        elif kind == "prefix":
            prompt, answer = f"{dice.choice(prefixes)} {_words(words, 64)}", 64
        elif kind == "long":
            prompt, answer = _words(words, int(max_model_len * LONG_SHARE)), LONG_ANSWER
        elif texts:
            text = texts[number % len(texts)]
            prompt, answer = f"{_words(words, 4)} {text.prompt}", text.output_tokens
        else:
            tokens, answer = dice.choice(chat_lengths())
            prompt = _words(words, tokens)
        made.append(Request(prompt, min(answer_tokens or answer, max_model_len // 4)))
    return made


def _words(words: random.Random, tokens: int) -> str:
    return " ".join(words.choices(WORDS, k=tokens))


def read_texts(path: Path) -> list[Request]:
    """JSONL of {"prompt", "output_tokens"}. Raises ValueError naming the line."""
    read = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            read.append(Request(str(record["prompt"]), int(record["output_tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number}: expected {{'prompt': text, 'output_tokens': number}}: {error}"
            ) from error
    if not read:
        raise ValueError(f"{path}: no line in it")
    return read
