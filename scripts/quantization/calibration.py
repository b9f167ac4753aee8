"""From texts to what a producer sees: rendered, tokenized, put one after the other, cut into blocks of one length.

Nothing is dropped for being long: a text is cut into pieces of a block's length, every text's first piece comes before
any second one, and so on until there is enough. What the gate will judge with (held-out texts) is put aside first. The
same source, seed and tokenizer give the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from scripts.quantization import QuantizeError, config, manifest
from scripts.quantization.texts import Text

HELD_OUT_MOST = 1024  # tokens of one held-out text: two windows of the gate's, so that many texts have their say


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Through the chat template. Raises ValueError where the template refuses the conversation."""

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens are read where the text spells them, none is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text that encodes to them, special tokens spelled out."""

    def end_of_turn(self) -> int | None:
        """The special token that the chat template puts after an answer: where a chat has to stop. None: no such."""


@dataclass(frozen=True)
class Prepared:
    """blocks: token ids, each of the same length. held_out: heldout.jsonl, byte for byte."""

    blocks: tuple[tuple[int, ...], ...]
    held_out: bytes
    calibration: manifest.Calibration
    held_out_info: manifest.HeldOut


def prepare(
    wanted: config.Calibration, texts: Sequence[Text], kind: str, tokenizer: Tokenizer, *, vocab: int
) -> Prepared:
    """Raises QuantizeError where the texts do not reach, saying how far they do."""
    groups = _shuffled_groups(texts, wanted.seed)
    rendered = _Rendered(tokenizer, vocab)
    held, held_tokens = _hold_out(groups, wanted.held_out_tokens, rendered)
    need = wanted.blocks * wanted.block_tokens
    stream, used = _pieces([text for group in groups for text in group], need, wanted.block_tokens, rendered)
    blocks = tuple(_blocks(stream, wanted.block_tokens))[: wanted.blocks]
    if held_tokens < wanted.held_out_tokens or len(blocks) < wanted.blocks:
        raise QuantizeError(_too_little(wanted, len(texts), held_tokens + len(stream), rendered))
    held_bytes = "".join(line + "\n" for line in held).encode()
    return Prepared(
        blocks,
        held_bytes,
        manifest.Calibration(
            source=wanted.source,
            format=kind,
            seed=wanted.seed,
            sha256=hash_blocks(blocks),
            texts=used,
            texts_found=len(texts),
            blocks=len(blocks),
            block_tokens=wanted.block_tokens,
            tokens=len(blocks) * wanted.block_tokens,
        ),
        manifest.HeldOut(sha256=hashlib.sha256(held_bytes).hexdigest(), texts=len(held), tokens=held_tokens),
    )


def hash_blocks(blocks: Iterable[Sequence[int]]) -> str:
    """SHA-256 over the ids as decimal numbers, a space between two, a line a block."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update((" ".join(map(str, block)) + "\n").encode())
    return digest.hexdigest()


def _shuffled_groups(texts: Sequence[Text], seed: int) -> list[list[Text]]:
    """Parts of one conversation stay together, so that none is calibrated on while another is held out."""
    groups: dict[str, list[Text]] = {}
    for text in texts:
        groups.setdefault(text.group, []).append(text)
    order = list(groups.values())
    random.Random(seed).shuffle(order)  # noqa: S311 - repeatable, not secret
    return order


def _hold_out(groups: list[list[Text]], wanted: int, rendered: _Rendered) -> tuple[list[str], int]:
    """Lines of heldout.jsonl; takes their groups out of `groups`."""
    lines: list[str] = []
    tokens = 0
    while groups and tokens < wanted:
        for text in groups.pop(0):
            ids = rendered.of(text)[:HELD_OUT_MOST]
            if ids:
                said = rendered.tokenizer.decode(ids)
                lines.append(json.dumps({"id": text.key, "text": said}, ensure_ascii=False))
                tokens += len(ids)
    return lines, tokens


def _pieces(texts: Sequence[Text], need: int, size: int, rendered: _Rendered) -> tuple[list[int], int]:
    """Tokens, `need` of them or all there are, and how many texts they are of."""
    stream: list[int] = []
    rest: list[list[int]] = []
    used = 0
    for text in texts:
        if len(stream) >= need:
            return stream, used
        ids = rendered.of(text)
        if ids:
            stream += ids[:size]
            rest.append(ids[size:])
            used += 1
    while len(stream) < need and (rest := [ids for ids in rest if ids]):
        for index, ids in enumerate(rest):
            if len(stream) < need:
                stream += ids[:size]
                rest[index] = ids[size:]
    return stream, used


def _blocks(stream: Sequence[int], size: int) -> Iterable[tuple[int, ...]]:
    for start in range(0, len(stream) - size + 1, size):
        yield tuple(stream[start : start + size])


class _Rendered:
    """Renders and tokenizes; keeps count of what the template refused, with its first reason."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.tokenizer, self.vocab = tokenizer, vocab
        self.refused = 0
        self.why = ""

    def of(self, text: Text) -> list[int]:
        """The ids of the text as the model reads it; none where the chat template refuses it."""
        try:
            rendered = self.tokenizer.render(text.messages)
        except ValueError as error:
            self.refused += 1
            self.why = self.why or " ".join(str(error).split())
            return []
        ids = self.tokenizer.encode(rendered)
        if ids and max(ids) >= self.vocab:
            raise QuantizeError(
                f"the tokenizer gives token {max(ids)} where the model knows {self.vocab}: "
                "tokenizer and weights are not of one model; download both again"
            )
        return ids


def _too_little(wanted: config.Calibration, texts: int, tokens: int, rendered: _Rendered) -> str:
    need = wanted.held_out_tokens + wanted.blocks * wanted.block_tokens
    refused = f"; the chat template refused {rendered.refused} of them ({rendered.why})" if rendered.refused else ""
    left = (tokens - wanted.held_out_tokens) // wanted.block_tokens
    smaller = f", or set calibration.blocks to {left}" if left >= 1 else ""
    return (
        f"calibration.source {wanted.source}: {texts} texts give {tokens:,} tokens{refused}; {need:,} are needed "
        f"({wanted.held_out_tokens:,} held out for the gate, then {wanted.blocks} blocks of {wanted.block_tokens}): "
        f"add texts{smaller}"
    )


def describe(prepared: Prepared, say: Callable[[str], None]) -> None:
    """The length rule in numbers: how much of the source was used, and how."""
    told = prepared.calibration
    say(
        f"calibration: {told.tokens:,} tokens ({told.blocks} blocks of {told.block_tokens}) out of {told.texts} of "
        f"{told.texts_found:,} texts of {told.source}; long texts are cut into pieces, none is dropped"
    )
    say(f"held out for the gate: {prepared.held_out_info.tokens:,} tokens, {prepared.held_out_info.texts} texts")
