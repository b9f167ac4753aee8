"""How far an artifact's predictions are from the original's: perplexity, KL divergence, top-1 agreement. Pure.

An engine tells the most likely tokens of a position, not the whole vocabulary. Both sides are therefore compared on a
partition: a bucket for each token of the union of both top-20, and one for all the rest. What one side did not list of
the union is bounded: it is at most as likely there as the least likely one that was listed. Where it is the original
that did not list it, the token goes to the rest; where it is the artifact, it gets the share that makes the divergence
smallest within that bound. So the figure is never above the true one, and a broken artifact can't hide in the rest.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOP = 20
_FLOOR = 1e-9  # a bucket that float32 logarithms round to nothing, or below


@dataclass(frozen=True)
class Position:
    """One predicted token of a text: its id, its natural log probability, and those of the most likely tokens."""

    token: int
    logprob: float
    listed: Mapping[int, float]

    @property
    def best(self) -> int:
        """The most likely token; of equals the lowest id, so that both sides choose alike."""
        return min(self.listed, key=lambda token: (-self.listed[token], token))


Window = Sequence[Position]


@dataclass(frozen=True)
class Figures:
    """Over all positions of all windows. KL in nats, of the artifact from the original (P log P/Q, P the original's).

    kl_error: standard error of kl_mean over windows, whose positions hang together. guessed: share of the original's
    probability on tokens of the union that the artifact did not list.
    """

    tokens: int
    windows: int
    ppl_original: float
    ppl_artifact: float
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_p99: float
    top1: float
    guessed: float
    kl_histogram: tuple[int, ...]

    @property
    def ppl_rise(self) -> float:
        """0.15 is 15 % above the original's."""
        return self.ppl_artifact / self.ppl_original - 1


def rise(value: float) -> str:
    """A ppl_rise for people: +15.9%, or how many times where a percentage says nothing any more."""
    return f"{value:+.1%}" if value < 9 else f"{value + 1:,.3g} times"


# Upper edges of the histogram's bars; the last bar is open.
EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def divergence(original: Position, artifact: Position) -> tuple[float, float]:
    """(KL in nats, the original's probability on tokens that the artifact did not list) of one position."""
    p_listed, q_listed = original.listed, artifact.listed
    union = sorted((_top(p_listed) | _top(q_listed)) & p_listed.keys())
    p = [math.exp(p_listed[token]) for token in union]
    p.append(max(_FLOOR, 1 - sum(p)))
    q = [math.exp(q_listed[token]) if token in q_listed else math.nan for token in union]
    missing = [index for index, value in enumerate(q) if math.isnan(value)]
    rest = max(_FLOOR, 1 - sum(value for value in q if not math.isnan(value)))
    q.append(rest)
    _fill(p, q, missing, math.exp(_least(artifact)))
    total_p, total_q = sum(p), sum(max(_FLOOR, value) for value in q)
    kl = sum(a / total_p * math.log(a / total_p * total_q / max(_FLOOR, b)) for a, b in zip(p, q, strict=True))
    return max(0.0, kl), sum(p[index] for index in missing)


def _fill(p: Sequence[float], q: list[float], missing: Sequence[int], bound: float) -> None:
    """Spreads q's last bucket over it and the missing ones in proportion to p, none of those above `bound`."""
    mass, weight = q[-1], p[-1] + sum(p[index] for index in missing)
    for index in sorted(missing, key=lambda index: -p[index]):  # the likeliest meets the bound first
        q[index] = min(bound, mass * p[index] / weight)
        mass -= q[index]
        weight -= p[index]
    q[-1] = mass


def _least(position: Position) -> float:
    """No token that was not listed is likelier. The text's own one does not count: it is listed whatever its rank."""
    return min((value for token, value in position.listed.items() if token != position.token), default=0.0)


def _top(listed: Mapping[int, float]) -> set[int]:
    return set(heapq.nsmallest(TOP, listed, key=lambda token: (-listed[token], token)))


def compare(original: Sequence[Window], artifact: Sequence[Window]) -> Figures:
    """Both sides scored on the same token ids, window by window. Raises ValueError where they were not, or on none."""
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(original, artifact, strict=True)]
    if any(a.token != b.token for window in pairs for a, b in window):
        raise ValueError("the two sides were not scored on the same tokens")
    flat = [pair for window in pairs for pair in window]
    if not flat:
        raise ValueError("no position to compare")
    found = [[divergence(a, b) for a, b in window] for window in pairs]
    kl = sorted(value for window in found for value, _ in window)
    means = [statistics.fmean(value for value, _ in window) for window in found if window]
    histogram = [0] * (len(EDGES) + 1)
    for value in kl:
        histogram[sum(value >= edge for edge in EDGES)] += 1
    return Figures(
        tokens=len(flat),
        windows=len(pairs),
        ppl_original=_perplexity([a.logprob for a, _ in flat]),
        ppl_artifact=_perplexity([b.logprob for _, b in flat]),
        kl_mean=statistics.fmean(kl),
        kl_error=statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0,
        kl_median=statistics.median(kl),
        kl_p99=kl[min(len(kl) - 1, int(0.99 * len(kl)))],
        top1=sum(a.best == b.best for a, b in flat) / len(flat),
        guessed=statistics.fmean(value for window in found for _, value in window),
        kl_histogram=tuple(histogram),
    )


def _perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(min(700.0, -statistics.fmean(logprobs)))
