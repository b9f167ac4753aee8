"""What the measurements prove. Pure: numbers in, a `Check` out.

`fail` is said only where the engine contradicts what must be; what was not seen is a warning, and the verdict UNSURE.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.wording import several
from scripts.checks import Check, fail, judged, ok, skip, warn
from scripts.checks.proof.log import StartLog
from scripts.checks.proof.scrape import Scrape
from scripts.planner.numbers import MIB

Verdict = Literal["PASS", "FAIL", "UNSURE"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "UNSURE": 3}
LOG, BLOCKS, PREFIX, USAGE = "start-up log", "KV blocks", "prefix cache", "KV usage"
ESSENTIAL = (BLOCKS, PREFIX, USAGE)  # without these three there is no PASS


@dataclass(frozen=True)
class Sent:
    """One request of a pair: the change of the counters over it, and its client-side time to the first token.

    The changes are None where the release has no such counter. cached: what the answer's usage said, where it did.
    """

    queries: float | None
    hits: float | None
    hit_rate: float | None
    ttft_s: float
    cached: int | None = None


@dataclass(frozen=True)
class Pair:
    """A fresh prompt of `tokens` tokens, and the very same again."""

    tokens: int
    cold: Sent
    warm: Sent


@dataclass(frozen=True)
class Held:
    """Blocks in use (usage times the pool) before, at the most during, and after one long request; its lengths.

    returned_s: seconds after its end until the usage was back, None where it never was within the limit.
    """

    prompt: int
    answer: int
    before: float
    peak: float
    after: float
    returned_s: float | None


def pool_blocks(scrape: Scrape, log: StartLog | None) -> int | None:
    """Blocks of the pool: V1 up to 0.8 reports none on its page, so its log's tokens have to do."""
    if scrape.blocks:
        return scrape.blocks
    if log is not None and log.blocks:
        return log.blocks
    if log is not None and log.tokens and scrape.block_size:
        return log.tokens // scrape.block_size
    return None


def judge_blocks(scrape: Scrape, log: StartLog | None) -> Check:
    """The pool is cut into blocks; log and page agree on how many."""
    expected = "a pool cut into blocks (cache_config_info, start-up log)"
    blocks, size = pool_blocks(scrape, log), scrape.block_size
    if blocks is None or size is None:
        fix = "give its start-up log: --log FILE"
        return warn(BLOCKS, expected, f"neither page nor log says how many (block size {size})", fix)
    found = f"{blocks:,} blocks of {size} tokens, dtype {scrape.cache_dtype}"
    if scrape.tokens:
        found += f", {scrape.tokens:,} tokens"
    said = None if log is None else log.tokens or (log.blocks * size if log.blocks else None)
    paged = scrape.tokens or blocks * size
    # Up to 0.19 the log's tokens are blocks times size, later concurrency times max-model-len: never a block apart.
    if said is not None and scrape.engines == 1 and abs(said - paged) > size:
        fix = "give the log of this very engine, and of its last start"
        return warn(BLOCKS, "page and log agree", f"page {paged:,} tokens, log {said:,}: another engine's log?", fix)
    return ok(BLOCKS, expected, found + (f"; the log says the same: {said:,} tokens" if said is not None else ""))


def predicted_hits(tokens: int, block_size: int) -> int:
    """Tokens of a prompt sent again that come from the cache: whole blocks, and never its last token."""
    return (tokens - 1) // block_size * block_size


def judge_prefix(pairs: Sequence[Pair], first: Scrape) -> Check:
    """Each pair by itself: the counter moved by exactly the predicted blocks the second time, and not at all the first.

    A release counts queries in tokens or in blocks; the queries of a known prompt say which.
    """
    size = first.block_size
    expected = "a prompt sent twice hits all its whole blocks the second time, none the first"
    off = "prefix caching is off"
    if first.prefix_caching is False or first.hit_rate == -1:
        return fail(PREFIX, expected, off, "start the engine with --enable-prefix-caching (V1: without --no-...)")
    if size is None or not pairs:
        return warn(PREFIX, expected, "the block size is not known, so nothing could be predicted", "give --log FILE")
    if first.hits is None:
        return _judge_rate(pairs, first, expected)
    results = [_judge_pair(pair, size) for pair in pairs]
    wrong = [why for why in results if why]
    tokens, hits = pairs[0].tokens, predicted_hits(pairs[0].tokens, size)
    if not wrong:
        unit = "tokens" if pairs[0].warm.queries == tokens else "blocks"
        return ok(
            PREFIX,
            expected,
            f"{len(pairs)} of {several(len(pairs), 'prompt')} of {tokens} tokens: {first.hits_name} +0, then "
            f"+{pairs[0].warm.hits:g} {unit} = {several(hits // size, 'block')} of {size}, as predicted",
        )
    others = [why for why in wrong if "other requests" in why]
    found = f"{len(pairs) - len(wrong)} of {several(len(pairs), 'pair')} as predicted; {wrong[0]}"
    if others:
        return warn(PREFIX, expected, found, "run it while nothing else uses the engine")
    if first.speculative or first.engines > 1:
        why = "speculative decoding gives up a block" if first.speculative else "the second may meet another engine"
        return warn(PREFIX, expected, f"{found} ({why})", "nothing to mend: an exact figure can't be predicted here")
    return fail(PREFIX, expected, found, "look for a connector, a hybrid model or an option that changes caching")


def disturbed(pair: Pair, size: int) -> str | None:
    """What tells that the counters moved by more (or less) than this pair's own requests; None where nothing does."""
    for sent in (pair.cold, pair.warm):
        if sent.queries not in (None, pair.tokens, pair.tokens // size):
            return f"queries moved by {sent.queries:g} over a prompt of {pair.tokens} tokens: other requests, or none"
    return None


def _judge_pair(pair: Pair, size: int) -> str | None:
    """None if it went as predicted, else what was different."""
    if (why := disturbed(pair, size)) is not None:
        return why
    by_tokens = pair.warm.queries == pair.tokens
    wanted = predicted_hits(pair.tokens, size) // (1 if by_tokens else size)
    if pair.cold.hits != 0:
        return f"a fresh prompt hit {pair.cold.hits:g}"
    if pair.warm.hits != wanted:
        return f"the second time hit {pair.warm.hits:g} of {wanted} predicted"
    if pair.warm.cached is not None and pair.warm.cached != predicted_hits(pair.tokens, size):
        return f"the answer's usage says {pair.warm.cached} cached tokens"
    return None


def _judge_rate(pairs: Sequence[Pair], first: Scrape, expected: str) -> Check:
    """V0 exports a ratio over its whole life alone: it must rise over each second sending."""
    if first.hit_rate is None:
        return warn(PREFIX, expected, "the page has no series about prefix caching", "this release can't be checked")
    rose = sum((pair.warm.hit_rate or 0) > (pair.cold.hit_rate or 0) for pair in pairs)
    last = pairs[-1].warm.hit_rate or 0
    found = f"the hit rate rose over {rose} of {len(pairs)} second sendings, to {last:.3f} (V0 has no counter)"
    return judged(rose == len(pairs), PREFIX, expected, found, "run it while nothing else uses the engine", "warn")


def judge_ttft(pairs: Sequence[Pair]) -> Check:
    """Faster only where every second sending beat every first one; else the noise is larger, and that is said."""
    name, expected = "first token", "the second sending's first token comes sooner"
    cold, warm = [pair.cold.ttft_s for pair in pairs], [pair.warm.ttft_s for pair in pairs]
    if len(pairs) < 3:
        return skip(name, expected, "fewer than three pairs were sent")
    shown = (
        f"median {_ms(statistics.median(cold))} ms fresh ({_ms(min(cold))} to {_ms(max(cold))}), "
        f"{_ms(statistics.median(warm))} ms repeated ({_ms(min(warm))} to {_ms(max(warm))}), {len(pairs)} pairs"
    )
    # Under "no difference" a complete separation of n and n has probability n!n!/(2n)!: 1 in 252 for five pairs.
    if max(warm) < min(cold):
        odds = math.comb(2 * len(pairs), len(pairs))
        return ok(name, expected, f"{shown}: every repeated one beat every fresh one (1 in {odds} by chance)")
    return skip(name, expected, f"{shown}: they overlap, so the noise is larger than the gain")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}" if seconds >= 0.01 else f"{seconds * 1000:.1f}"


def judge_usage(held: Held, scrape: Scrape, blocks: int | None) -> Check:
    """The usage rose by the request's blocks and came back. Blocks are handed out as tokens come: that is paging."""
    total = held.prompt + held.answer
    expected = f"usage rises by the blocks of {total} tokens and comes back"
    size = scrape.block_size
    if blocks is None or size is None:
        rose = held.peak > held.before and held.returned_s is not None
        found = f"{scrape.usage_name} rose and came back; without the pool's size no blocks can be predicted"
        return warn(USAGE, expected, found if rose else f"{scrape.usage_name} did not move", "give --log FILE")
    low, high = math.ceil(held.prompt / size), math.ceil(total / size)
    rise = held.peak - held.before
    found = (
        f"{held.before:.0f} -> {held.peak:.0f} -> {held.after:.0f} of {blocks:,} blocks "
        f"({rise / blocks * 100:.2f} % of the pool); predicted {low} to {high}"
    )
    if held.returned_s is None:
        fix = "other requests are running, or finished requests keep their blocks: look at num_requests_running"
        return warn(USAGE, expected, f"{found}; it did not come back", fix)
    if rise < 0.5:
        return warn(USAGE, expected, f"{found}; no scrape saw it rise", "run it again: the request was too quick")
    # One block of slack either way: the reserved one in the pool's count, a look-ahead, a scrape between two steps.
    slack = 1 + (2 if scrape.speculative else 0)
    if low - slack <= rise <= high + slack:
        return ok(USAGE, expected, f"{found}; back after {held.returned_s:.2f} s")
    fix = "a hybrid model or a sliding window holds other blocks; else something else was running"
    return warn(USAGE, expected, found, fix)


def judge_memory(deltas: Sequence[int], request_bytes: int | None, tokens: int, what: str) -> Check:
    """deltas: growth over each fresh long request, in bytes. The pool is pre-allocated, so nothing should grow.

    The first request may still warm up an allocator; a pool that grew on demand would grow by every fresh request.
    """
    name, expected = "memory", "no growth: the pool was allocated at the start, a request only takes blocks of it"
    grown = ", ".join(f"{delta / MIB:+.1f} MiB" for delta in deltas)
    shown = f"{what}: {grown} over {several(len(deltas), 'fresh request')} of {tokens} tokens"
    if request_bytes is None:
        return skip(name, expected, f"{shown}; the model's KV bytes a token are not known, so nothing is judged")
    size = f"{request_bytes / MIB:.1f} MiB of KV cache each"
    if deltas[-1] * 4 <= request_bytes:
        warmed = "; the first one warmed up an allocator" if len(deltas) > 1 else ""
        return ok(name, expected, f"{shown}, {size}{warmed}")
    return warn(name, expected, f"{shown}, {size}", "run it again; growth by every request is a leak, not paging")


def needs_second(delta: int, request_bytes: int | None) -> bool:
    """Whether one request's growth is large enough to ask whether the next one grows as well."""
    return request_bytes is not None and delta * 10 > request_bytes


def verdict(checks: Sequence[Check]) -> tuple[Verdict, str]:
    """PASS needs the three essential proofs; a contradiction anywhere is FAIL; everything else is UNSURE, with why.

    A log need not be given, but one that is given and can't be used leaves the question open that it was given for.
    """
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        return "FAIL", "; ".join(f"{check.name}: {check.found}" for check in failed)
    proven = {check.name for check in checks if check.status == "ok"}
    missing = [check for check in checks if check.name in ESSENTIAL and check.name not in proven]
    missing += [check for check in checks if check.name == LOG and check.status == "warn"]
    if missing:
        return "UNSURE", "; ".join(f"{check.name}: {check.found}" for check in missing)
    if absent := [name for name in ESSENTIAL if name not in proven]:
        return "UNSURE", f"not looked at: {', '.join(absent)}"
    return "PASS", "paged KV and prefix caching work: blocks, hits and usage moved as predicted"


def pool_bytes(scrape: Scrape, log: StartLog | None) -> int | None:
    """Bytes of the whole pool, where page or log says them."""
    if scrape.pool_bytes:
        return scrape.pool_bytes
    return round(log.pool_gib * (1 << 30)) if log is not None and log.pool_gib else None
