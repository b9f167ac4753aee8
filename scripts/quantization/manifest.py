"""What an artifact is and how it came to be: `manifest.json`, the last file written into its directory.

    MODELS_DIR/<name>/<digest>/            a finished artifact; the directory appears whole, by one rename
        model*.safetensors, config.json, generation_config.json, tokenizer*, chat_template.jinja
        heldout.jsonl                      texts that calibration never saw, for the gate
        README.md                          the model card
        manifest.json
    MODELS_DIR/<name>/.<digest>.partial/   a job at work, or what an interrupted one left; never served
    MODELS_DIR/<name>/.quantize.lock       held (flock) by the job at work

A line of heldout.jsonl is {"id": str, "text": str}: a conversation rendered through the chat template, special tokens
included, so it is tokenized with add_special_tokens=False.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from scripts.quantization import QuantizeError

MANIFEST = "manifest.json"
HELD_OUT = "heldout.jsonl"
CARD = "README.md"
FORMAT: Final = 1
_DIGEST_LENGTH = 12


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class File(_Part):
    """bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


class Source(_Part):
    """Where the weights came from. model: a hub id or a directory, from MODELS_DIR where it lies in it; revision: the
    hub's commit, or "local"; files: every file that was read."""

    model: str
    revision: str
    architecture: str
    files: dict[str, File]


class Calibration(_Part):
    """sha256: of the token ids, block after block. tokens = blocks * block_tokens: what the producer really saw.

    texts: conversations or passages that gave those tokens, of texts_found in the source.
    """

    source: str
    format: str
    seed: int
    sha256: str
    texts: int
    blocks: int
    block_tokens: int
    tokens: int
    texts_found: int


class HeldOut(_Part):
    """The texts of heldout.jsonl; tokens by the original's tokenizer."""

    sha256: str
    texts: int
    tokens: int


class Layer(_Part):
    """One decoder layer. error: mean squared difference of its output after quantization over the output's own mean
    square, on one calibration block; None where the producer does not let it be measured."""

    index: int
    s: float
    error: float | None = None


class Run(_Part):
    """The run that made it. Times are UTC, ISO 8601; peaks are of the whole process."""

    started_at: str
    finished_at: str
    stages_s: dict[str, float]
    device: str
    device_name: str
    peak_ram_bytes: int
    peak_gpu_bytes: int | None
    layers: tuple[Layer, ...]


class Manifest(_Part):
    """digest: of everything that decides the result (config, source files, calibration, versions); it names the
    directory. files: every file of the directory but this one. gate: the gate's verdict, None until it has judged."""

    format: Literal[1] = FORMAT
    name: str
    digest: str
    producer: Literal["autoawq", "llmcompressor"]
    quantization: dict[str, Any]
    config: dict[str, Any]
    source: Source
    calibration: Calibration
    held_out: HeldOut
    versions: dict[str, str]
    run: Run
    files: dict[str, File]
    gate: dict[str, Any] | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(file.bytes for name, file in self.files.items() if name.endswith(".safetensors"))


def artifact_dir(models: Path, name: str, digest: str) -> Path:
    return models / name / digest


def partial_dir(models: Path, name: str, digest: str) -> Path:
    """Where a job works; on the same file system, so that one rename finishes it."""
    return models / name / f".{digest}.partial"


def digest_of(parts: dict[str, Any]) -> str:
    """The short name of whatever decides the result; equal parts give equal names."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


def hash_file(path: Path) -> File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return File(bytes=path.stat().st_size, sha256=digest)


def read(directory: Path) -> Manifest:
    """Raises QuantizeError where there is none, or none that this version understands."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise QuantizeError(f"{directory} has no {MANIFEST}: no quantization job finished it") from None
    except OSError as error:
        raise QuantizeError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise QuantizeError(f"{path} is no manifest of format {FORMAT}: {where}: {first['msg']}") from None


def write(directory: Path, manifest: Manifest) -> None:
    """Replaces the manifest; a reader sees the old one or the new one. Raises OSError."""
    path = directory / MANIFEST
    part = path.with_name(f".{MANIFEST}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.chmod(0o644)  # a container reads it as another user
    part.replace(path)
    sync_dir(directory)


def sync_dir(directory: Path) -> None:
    """Makes renames and new names in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damage(directory: Path, manifest: Manifest, *, hashes: bool = False) -> Iterator[str]:
    """What of the directory is not as the manifest says: names and sizes, with `hashes` every byte."""
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != expected.bytes:
            yield f"{name} has {path.stat().st_size} bytes where {expected.bytes} were written"
        elif hashes and hash_file(path).sha256 != expected.sha256:
            yield f"{name} has another checksum than when it was written"
