"""Lengths of real chats, as pairs of prompt and answer tokens, for workloads.py.

    .venv-engine/bin/python -m scripts.bench.lengths SHAREGPT.json --tokenizer DIR [--count 500] [--texts FILE]

Reads conversations one by one, so a file that is cut off gives what it holds whole. Kept are first turns of 4 to 1,024
prompt tokens and at most 2,048 tokens in all, the same filter `vllm bench serve` applies;
they are printed as JSON, which is how lengths.json came about. With --texts the prompts
themselves are written as JSONL, one {"prompt", "output_tokens"} a line: for `make bench ARGS='--texts FILE'`.
Exit codes: 0 written, 2 wrong usage or unreadable input.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LEAST, MOST_PROMPT, MOST_TOTAL = 4, 1024, 2048


def conversations(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, up to where the text is cut off."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \r\n\t,":
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield value


def first_turns(
    chats: list[dict[str, Any]], count: Callable[[str], int], limit: int, seed: int = 0
) -> list[tuple[str, int, int]]:
    """At most `limit` (prompt, prompt tokens, answer tokens), in a seeded order."""
    random.Random(seed).shuffle(chats)
    kept: list[tuple[str, int, int]] = []
    for chat in chats:
        turns = chat.get("conversations") or []
        if len(turns) < 2:
            continue
        prompt = turns[0]["value"]
        tokens, answer = count(prompt), count(turns[1]["value"])
        if min(tokens, answer) >= LEAST and tokens <= MOST_PROMPT and tokens + answer <= MOST_TOTAL:
            kept.append((prompt, tokens, answer))
        if len(kept) == limit:
            break
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.lengths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--texts", type=Path, help="write the prompts there as well, as JSONL")
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    try:
        chats = list(conversations(arguments.file.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError) as error:
        print(f"lengths: {arguments.file}: {error}", file=sys.stderr)
        return 2
    kept = first_turns(chats, lambda text: len(tokenizer(text).input_ids), arguments.count)
    if arguments.texts:
        lines = [json.dumps({"prompt": prompt, "output_tokens": answer}) for prompt, _, answer in kept]
        arguments.texts.write_text("\n".join(lines) + "\n")
    print(json.dumps([[tokens, answer] for _, tokens, answer in kept], separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
