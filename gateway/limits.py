"""Arithmetic of admission: what a request costs, how fast work drains, what a key may still do. Pure.

Numbers only, the clock is passed in: enforcing them is admission.py's business.
"""

import math
from dataclasses import dataclass

from gateway.protocol import Envelope, PromptSize


class TokenEstimator:
    """Prompt tokens from text sizes, learned from the usage that engines return.

    A linear model over (1, characters, extra bytes), fitted by recursive least squares with forgetting, relative error
    weighted so that long prompts don't drown short ones. Two text features suffice to tell Chinese from English; the
    constant is the chat template.
    """

    # Before anything was learned: four characters a token, and CJK (two extra bytes a character) near one.
    PRIOR = (8.0, 0.25, 0.35)
    FORGETTING = 0.995

    def __init__(self) -> None:
        self.weights = list(self.PRIOR)
        self.samples = 0
        # Confidence in the prior, in the scaled units of `observe`: loose, so that a few dozen answers outweigh it.
        self._covariance = [[10.0 if i == j else 0.0 for j in range(3)] for i in range(3)]

    def estimate(self, size: PromptSize) -> int:
        """Tokens, at least one a prompt. Ids count as themselves."""
        if not size.chars:
            return max(size.prompts, size.ids)
        constant, per_char, per_extra = self.weights
        text = constant * size.prompts + per_char * size.chars + per_extra * size.extra_bytes
        return max(size.prompts, size.ids + math.ceil(text))

    def observe(self, size: PromptSize, prompt_tokens: int) -> None:
        """Learn from one answer's usage."""
        if not size.chars or size.ids or prompt_tokens <= 0:
            return
        scale = 1.0 / prompt_tokens
        x = [size.prompts * scale, size.chars * scale, size.extra_bytes * scale]
        covariance = self._covariance
        px = [sum(covariance[i][j] * x[j] for j in range(3)) for i in range(3)]
        denominator = self.FORGETTING + sum(x[i] * px[i] for i in range(3))
        gain = [value / denominator for value in px]
        error = 1.0 - sum(self.weights[i] * x[i] for i in range(3))
        for i in range(3):
            # A token is never less than a quarter... of nothing: negative weights would price some text below zero.
            self.weights[i] = max(0.0, self.weights[i] + gain[i] * error)
        for i in range(3):
            for j in range(3):
                # The cap keeps directions that traffic never excites from growing without bound while others forget.
                covariance[i][j] = (covariance[i][j] - gain[i] * px[j]) / self.FORGETTING
            covariance[i][i] = min(covariance[i][i], 1e3)
        self.samples += 1


def request_cost(envelope: Envelope, estimator: TokenEstimator, assumed_answer_tokens: int) -> int:
    """Tokens of KV cache a request may come to occupy: its prompts plus every choice's full answer."""
    answer = assumed_answer_tokens if envelope.max_tokens is None else envelope.max_tokens
    return estimator.estimate(envelope.size) + envelope.size.prompts * envelope.n * answer


class DrainRate:
    """Tokens a second that finishing requests give back, measured only while others were waiting.

    Time without a queue says nothing about capacity: then arrivals set the pace.
    """

    def __init__(self, time_constant_s: float = 10.0) -> None:
        self.time_constant_s = time_constant_s
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: int, elapsed_s: float) -> None:
        """`tokens` were given back during the last `elapsed_s` saturated seconds."""
        keep = math.exp(-elapsed_s / self.time_constant_s)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + elapsed_s

    @property
    def tokens_per_s(self) -> float | None:
        """None until half a second of saturation was seen."""
        if self._seconds < 0.5 or self._tokens <= 0:
            return None
        return self._tokens / self._seconds


class Residence:
    """How long a request stays in flight (seconds, moving mean); by Little's law, the pace before saturation."""

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight
        self.mean_s: float | None = None

    def observe(self, seconds: float) -> None:
        self.mean_s = seconds if self.mean_s is None else self.mean_s + self.weight * (seconds - self.mean_s)


@dataclass
class Allowance:
    """A token bucket: `per_minute` refills continuously, a full minute's worth may come at once. Mutable; one owner."""

    per_minute: float
    level: float
    at_s: float

    @classmethod
    def full(cls, per_minute: float, now_s: float) -> "Allowance":
        return cls(per_minute, per_minute, now_s)

    def take(self, amount: float, now_s: float) -> float:
        """0.0 and taken; or, untouched, the seconds until it would fit. More than a minute's worth: a full bucket."""
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / 60)
        self.at_s = now_s
        needed = min(amount, self.per_minute)
        if self.level >= needed:
            self.level -= amount
            return 0.0
        return (needed - self.level) * 60 / self.per_minute

    def give_back(self, amount: float) -> None:
        """Return what an estimate took too much (or, negative, too little)."""
        self.level = min(self.per_minute, self.level + amount)
