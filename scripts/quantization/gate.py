"""PASS, FAIL or ABSTAIN from figures, chats and limits. Pure: nothing is read, started or written here.

FAIL: the artifact was measured and is not fit to serve. ABSTAIN: it could not be measured well enough to say; nothing
is promoted on it either. Reasons name figure, limit and where the limit stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scripts.quantization.figures import Figures, rise
from scripts.quantization.gate_config import Chat, GateConfig, SizeClass
from scripts.quantization.language import speaks

Verdict = Literal["PASS", "FAIL", "ABSTAIN"]
CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 4, "ABSTAIN": 3}


@dataclass(frozen=True)
class Answer:
    """What one side said to a sanity chat at temperature 0. finish: the engine's finish_reason."""

    text: str
    finish: str


@dataclass(frozen=True)
class Talk:
    """One sanity chat: both answers, and what is wrong with each (empty: nothing)."""

    chat: Chat
    original: Answer
    artifact: Answer
    original_wrong: str
    artifact_wrong: str

    @property
    def counts(self) -> bool:
        """The original sets the bar: what it can't do itself says nothing about the artifact."""
        return not self.original_wrong


@dataclass(frozen=True)
class Judgement:
    """reasons: why not PASS, most telling first; empty for a PASS. notes: what to know beside it."""

    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def fault(chat: Chat, answer: Answer) -> str:
    """What is wrong with an answer, in a few words; empty where nothing is."""
    if answer.finish != "stop":
        return f"did not end by itself (finish_reason {answer.finish})"
    if not answer.text.strip():
        return "is empty"
    if not speaks(answer.text, chat.language):
        return f"is not in the language it was asked for ({chat.language})"
    said = answer.text.casefold()
    if chat.expect and not any(word.casefold() in said for word in chat.expect):
        return f"does not say {' or '.join(map(repr, chat.expect))}"
    return ""


def talk(chat: Chat, original: Answer, artifact: Answer) -> Talk:
    return Talk(chat, original, artifact, fault(chat, original), fault(chat, artifact))


def judge(
    config: GateConfig,
    size: SizeClass,
    figures: Figures | None,
    talks: Sequence[Talk],
    token_difference: str | None,
) -> Judgement:
    """`figures` None: no held-out text was scored. `token_difference`: how the two tokenizers differ on that text."""
    limits = size.limits
    failed: list[str] = []
    if token_difference is not None:
        failed.append(f"the artifact's tokenizer is not the original's: {token_difference}")
    if figures is not None:
        if figures.ppl_rise > limits.ppl_rise_max:
            failed.append(
                f"perplexity {figures.ppl_artifact:.4g} is {rise(figures.ppl_rise)} against the original's "
                f"{figures.ppl_original:.4g}; {limits.ppl_rise_max:+.0%} is allowed"
            )
        if figures.kl_mean > limits.kl_mean_max:
            failed.append(f"KL {figures.kl_mean:.3f} nats a token; {limits.kl_mean_max:.3f} is allowed")
        if figures.top1 < limits.top1_min:
            failed.append(f"top-1 agreement {figures.top1:.3f}; at least {limits.top1_min:.3f} is expected")
    counted = [found for found in talks if found.counts]
    wrong = [found for found in counted if found.artifact_wrong]
    if len(wrong) > len(counted) * limits.chats_wrong_max:
        first = wrong[0]
        failed.append(
            f"{len(wrong)} of {len(counted)} sanity chats went wrong; "
            f"the answer to {first.chat.ask!r} {first.artifact_wrong}"
        )
    notes = [] if size.measured else [f"the limits of {size.name} are provisional: no model of that size was measured"]
    if failed:
        return Judgement("FAIL", tuple(failed), tuple(notes))
    unsure: list[str] = []
    tokens = figures.tokens if figures is not None else 0
    if tokens < config.text.min_tokens:
        unsure.append(
            f"{tokens} held-out tokens were scored and {config.text.min_tokens} are needed: "
            "raise calibration.held_out_tokens, or give the source more text"
        )
    if len(counted) < config.chats_min:
        unsure.append(
            f"the original itself manages {len(counted)} of {len(talks)} sanity chats and {config.chats_min} are "
            "needed: change chats in the gate's configuration to what it can do"
        )
    return Judgement("ABSTAIN" if unsure else "PASS", tuple(unsure), tuple(notes))
