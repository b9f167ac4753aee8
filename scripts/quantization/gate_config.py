"""configs/quantize/gate.yaml: the text, the chats and the limits that decide whether an artifact may be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from scripts.quantization import QuantizeError
from scripts.quantization.language import LANGUAGES
from scripts.quantization.mistakes import first_mistake

PATH = Path("configs/quantize/gate.yaml")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Text(_Part):
    """window_tokens: an engine holds a window's logits over the whole vocabulary at once. listed: how many most likely
    tokens each side tells per position; the figures use the union of both top-20 and look the rest up here."""

    window_tokens: int = Field(512, ge=32, le=512)
    max_tokens: int = Field(16384, ge=256)
    min_tokens: int = Field(4096, ge=1)
    listed: int = Field(64, ge=20, le=1000)


class Chat(_Part):
    """expect: the answer must hold one of these, whatever its case; none: anything said well will do."""

    ask: str = Field(min_length=1)
    language: str = "en"
    expect: tuple[str, ...] = ()

    @field_validator("language")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in LANGUAGES:
            raise ValueError(f"one of {', '.join(LANGUAGES)}")
        return value


class Limits(_Part):
    """ppl_rise_max: 0.2 allows 20 % above the original's. kl_mean_max: nats a token. top1_min: share of positions.
    chats_wrong_max: share of the chats that count; a small model answers some oddly whatever its weights are.
    """

    ppl_rise_max: float = Field(gt=0)
    kl_mean_max: float = Field(gt=0)
    top1_min: float = Field(gt=0, le=1)
    chats_wrong_max: float = Field(0.25, ge=0, lt=1)


class SizeClass(_Part):
    """up_to_gib: size of the original's 16-bit weights. measured: on what the limits rest; None: provisional."""

    name: str
    up_to_gib: float = Field(gt=0)
    limits: Limits
    measured: str | None = None


class Speed(_Part):
    """Answers of `tokens` tokens, one alone and `together` at once; `repeats` of each, of which the median counts."""

    tokens: int = Field(64, ge=1)
    together: int = Field(8, ge=1)
    repeats: int = Field(3, ge=1)


class Engine(_Part):
    """How the pinned engine serves both sides: `vllm serve` arguments, without their dashes, by kind of device."""

    max_model_len: int = Field(1024, ge=64)
    start_s: float = Field(900, gt=0)
    cpu: dict[str, str | int | float | bool] = Field(default_factory=dict)
    gpu: dict[str, str | int | float | bool] = Field(default_factory=dict)


class GateConfig(_Part):
    text: Text = Text()
    chats: tuple[Chat, ...] = Field(min_length=1)
    chat_tokens: int = Field(200, ge=8)
    chats_min: int = Field(2, ge=1)
    sizes: tuple[SizeClass, ...] = Field(min_length=1)
    speed: Speed = Speed()
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _consistent(self) -> GateConfig:
        sizes = [size.up_to_gib for size in self.sizes]
        if sizes != sorted(set(sizes)):
            raise ValueError("sizes: up_to_gib must rise from one to the next")
        if self.text.max_tokens < self.text.min_tokens:
            raise ValueError("text: max_tokens is below min_tokens, so every artifact would be abstained on")
        if self.engine.max_model_len <= self.text.window_tokens:
            raise ValueError("engine.max_model_len must be above text.window_tokens")
        return self

    def size(self, weight_bytes: int) -> SizeClass:
        """The class of an original of so many bytes of 16-bit weights; the largest also holds what is above it."""
        gib = weight_bytes / 2**30
        return next((size for size in self.sizes if gib <= size.up_to_gib), self.sizes[-1])


def load(path: Path = PATH) -> GateConfig:
    """Raises QuantizeError naming file, key, value and expectation."""
    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise QuantizeError(f"{path} is no YAML{f' (line {mark.line + 1})' if mark else ''}") from None
    if not isinstance(found, dict):
        raise QuantizeError(f"{path} should hold keys and values (text, chats, sizes, ...)")
    try:
        return GateConfig.model_validate(found)
    except ValidationError as error:
        raise QuantizeError(f"{path}: {first_mistake(error)}") from None
