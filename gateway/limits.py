"""Arithmetic of admission: what a request costs, how fast work drains, what a key may still do. Pure.

Numbers only, the clock is passed in: enforcing them is admission.py's business.
"""

import math
from dataclasses import dataclass

from gateway.protocol import Envelope, PromptSize

MOST_CHARS_A_TOKEN = 12  # beyond it a prompt is no text


class TokenEstimator:
    """Prompt tokens from text sizes, learned from the usage that engines return.

    A linear model over (prompts, characters, extra bytes) whose weights drift slowly: a Kalman filter on the relative
    error, so that long prompts don't drown short ones. Two text features suffice to tell Chinese from English; the
    constant is the chat template.
    """

    # Before anything was learned: a short template, four characters a token, and CJK (two extra bytes each) near one.
    PRIOR = (8.0, 0.25, 0.35)
    # Variances of the prior, as multiples of the relative error's own variance (about a tenth, squared).
    UNCERTAINTY = (1e5, 10.0, 30.0)
    DRIFT = 1e-5  # share of the prior's uncertainty that each answer gives back, up to all of it

    def __init__(self) -> None:
        self.weights = list(self.PRIOR)
        self._covariance = [[self.UNCERTAINTY[i] if i == j else 0.0 for j in range(3)] for i in range(3)]

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
        if prompt_tokens * MOST_CHARS_A_TOKEN < size.chars:
            return  # a run of spaces or the like: true, and no measure for anybody's next prompt
        # Unrolled: this runs once a request.
        x0, x1, x2 = size.prompts / prompt_tokens, size.chars / prompt_tokens, size.extra_bytes / prompt_tokens
        (p00, p01, p02), (_, p11, p12), (_, _, p22) = self._covariance
        g0 = p00 * x0 + p01 * x1 + p02 * x2
        g1 = p01 * x0 + p11 * x1 + p12 * x2
        g2 = p02 * x0 + p12 * x1 + p22 * x2
        scale = 1.0 / (1.0 + x0 * g0 + x1 * g1 + x2 * g2)
        w0, w1, w2 = self.weights
        # Clipped: one strange prompt, or one strange engine, moves everybody's estimate a little at most.
        error = max(-0.5, min(0.5, 1.0 - w0 * x0 - w1 * x1 - w2 * x2)) * scale
        # Never below zero: no text makes a prompt shorter.
        self.weights = [max(0.0, w0 + g0 * error), max(0.0, w1 + g1 * error), max(0.0, w2 + g2 * error)]
        u0, u1, u2 = self.UNCERTAINTY
        p00 = min(u0, p00 - g0 * g0 * scale + self.DRIFT * u0)
        p11 = min(u1, p11 - g1 * g1 * scale + self.DRIFT * u1)
        p22 = min(u2, p22 - g2 * g2 * scale + self.DRIFT * u2)
        p01, p02, p12 = p01 - g0 * g1 * scale, p02 - g0 * g2 * scale, p12 - g1 * g2 * scale
        self._covariance = [[p00, p01, p02], [p01, p11, p12], [p02, p12, p22]]


def request_cost(
    envelope: Envelope, estimator: TokenEstimator, assumed_answer_tokens: int, max_model_len: int | None = None
) -> int:
    """Tokens of KV cache a request may come to occupy: its prompts plus every choice's full answer.

    No answer is longer than `max_model_len`: who asks for more gets the engine's 400, and must not be billed for it.
    """
    answer = assumed_answer_tokens if envelope.max_tokens is None else envelope.max_tokens
    if max_model_len is not None:
        answer = min(answer, max_model_len)
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

    def under(self, per_minute: float) -> "Allowance":
        """The same use under another limit."""
        if per_minute == self.per_minute:
            return self
        return Allowance(per_minute, per_minute - (self.per_minute - self.level), self.at_s)

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
