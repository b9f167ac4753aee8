"""From what a producer saved to what is served: configs put right, tokenizer and template carried over, all of it on
the disk before its name appears."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.planner import PlanError
from scripts.planner.checkpoint import read_checkpoint
from scripts.quantization import QuantizeError, manifest
from scripts.quantization.source import WORDS, read_json

_WEIGHTS = (".safetensors", ".safetensors.index.json")
# What belongs to the text a model reads and writes, as the original has it.
_CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def configs(source: Path, out: Path, quantization: Mapping[str, Any], end_of_turn: int | None) -> None:
    """Replaces what the producer wrote beside the weights. The original's config.json stays what it is, key by key, in
    the spelling of whichever library wrote it; the producer's own copy would say use_cache false and sample true."""
    original, saved = read_json(source / "config.json"), read_json(out / "config.json")
    found = original | {"quantization_config": dict(quantization), "use_cache": True}
    if "tie_word_embeddings" in saved:  # a producer may store head and embedding apart
        found["tie_word_embeddings"] = saved["tie_word_embeddings"]
    _put(out / "config.json", found)
    generation = read_json(source / "generation_config.json")
    ends = end_tokens(generation.get("eos_token_id"), original.get("eos_token_id"), end_of_turn)
    if ends:
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    _put(out / "generation_config.json", generation)
    for path in out.iterdir():
        if path.name not in ("config.json", "generation_config.json") and not path.name.endswith(_WEIGHTS):
            path.unlink()
    for name in (*_CARRIED, *WORDS):
        if name != manifest.CARD and (source / name).is_file():  # the card is our own
            shutil.copyfile(source / name, out / name)


def end_tokens(*found: object) -> list[int]:
    """All of them, each once, in the order given: an int, a list of ints, or None."""
    ends: list[int] = []
    for each in found:
        for token in each if isinstance(each, list) else [each]:
            if isinstance(token, int) and not isinstance(token, bool) and token not in ends:
                ends.append(token)
    return ends


def check(out: Path, method: str) -> None:
    """That the shards are whole and hold packed weights. Raises QuantizeError."""
    try:
        found = read_checkpoint(out)
    except PlanError as error:
        raise QuantizeError(f"the producer saved no whole checkpoint: {error}") from None
    packed = "qweight" if method == "awq" else "weight_packed"
    if found is None or not any(name.endswith(packed) for name in found.tensors):
        raise QuantizeError(f"the producer saved no {packed} tensors: nothing was quantized")


def settle(path: Path) -> None:
    """Puts a shard's metadata into the order of its names, in place: the library's order is random, and the same
    weights would have another checksum each time. The header's length stays."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        raw = file.read(length)
        header = json.loads(raw)
        told = header.pop("__metadata__", None)
        if told:
            header = {"__metadata__": dict(sorted(told.items())), **header}
        settled = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(settled) > length:
            raise QuantizeError(f"{path.name} has a header of an unknown form")
        file.seek(8)
        file.write(settled.ljust(length))


def files(out: Path) -> dict[str, manifest.File]:
    """Every file but the manifest, hashed, readable for a container's user, and on the disk."""
    found = {}
    for path in sorted(out.iterdir()):
        if path.name == manifest.MANIFEST:
            continue
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[path.name] = manifest.hash_file(path)
    return found


def publish(out: Path, target: Path) -> None:
    """The one step after which the artifact counts. Raises OSError."""
    out.chmod(0o755)
    manifest.sync_dir(out)
    out.rename(target)
    manifest.sync_dir(target.parent)


def _put(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
