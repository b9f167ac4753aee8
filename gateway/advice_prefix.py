"""Why prompts miss the prefix cache, and whether anything can be done about it. Pure: facts in, findings out."""

from collections.abc import Mapping

from gateway import prefixes
from gateway.facts import Counts, Facts
from gateway.findings import Finding, count, listed, percent

GOOD = 0.7  # hits of queries: below it misses are explained
TRAFFIC_TOKENS = 2000  # in the window: fewer prompt tokens say nothing
LARGE_BLOCK = 32  # tokens
TENANTS = 5  # that are told apart in words; the numbers have all

_MISSES = (
    prefixes.SHORT,
    prefixes.FIRST_SEEN,
    prefixes.EVICTED,
    prefixes.RESTARTED,
    prefixes.SALTED,
    prefixes.ELSEWHERE,
    prefixes.TAIL,
)
_WORDS = {
    prefixes.SHORT: "prompts under one block",
    prefixes.FIRST_SEEN: "prefixes that were not repeated",
    prefixes.EVICTED: "evicted since they were cached",
    prefixes.RESTARTED: "cached before the engine's restart",
    prefixes.SALTED: "cached under another group's salt",
    prefixes.ELSEWHERE: "cached by another replica",
    prefixes.TAIL: "last blocks that were not full",
}


def prefix_cache(facts: Facts) -> list[Finding]:
    """Off; or too few hits under real traffic, explained."""
    off = [engine for engine in facts.engines if engine.prefix_caching is False and engine.prompt_tokens]
    if off:
        return [
            Finding(
                "prefix_off",
                f"Prefix caching is off on {listed([engine.name for engine in off])}.",
                f"All {count(sum(engine.prompt_tokens for engine in off))} prompt tokens were computed anew.",
                "Take no-enable-prefix-caching out of the profile: it costs no memory of its own.",
                {"prompt_tokens": sum(engine.prompt_tokens for engine in off)},
            )
        ]
    queries = sum(engine.queries or 0.0 for engine in facts.engines)
    hits = sum(engine.hits or 0.0 for engine in facts.engines)
    if queries < TRAFFIC_TOKENS or hits >= GOOD * queries:
        return []
    return [_explained(facts, queries, hits)]


def _explained(facts: Facts, queries: float, hits: float) -> Finding:
    head = f"The prefix cache gave {percent(hits / queries)} of {count(queries)} prompt tokens."
    numbers: dict[str, object] = {"queries": queries, "hits": hits, "hit_ratio": hits / queries}
    tenants = facts.gateway.prefix if facts.gateway else {}
    told = _summed(tenants)
    missed = misses(told, hits)
    total = sum(missed.values())
    if not total:
        why = "The gateway saw none of these prompts, so why they missed can't be told."
        return Finding("prefix_misses", head, why, "Send the traffic through the gateway.", numbers)
    seen = sum(told.values())
    numbers |= {"seen_tokens": seen, "missed": missed, "shares": {why: part / total for why, part in missed.items()}}
    # The keys' own parts: without the engine's total, which is everybody's, what may have hit is left out.
    apart = {tenant: misses(counts, None) for tenant, counts in tenants.items()}
    numbers["by_key"] = apart
    text = f"Of {count(total)} missed tokens: {_shares(missed, total)}."
    if len(apart) > 1:
        largest = sorted(apart, key=lambda tenant: -sum(apart[tenant].values()))[:TENANTS]
        text += " By key: " + "; ".join(
            f"{tenant} {count(sum(apart[tenant].values()))} ({_shares(apart[tenant], sum(apart[tenant].values()), 2)})"
            for tenant in largest
        )
        text += "."
    if seen < 0.8 * queries:
        text += f" The gateway saw {percent(seen / queries)} of the engines' prompt tokens; the rest came past it."
    cause = max((why for why in missed if why != prefixes.TAIL), key=lambda why: missed[why], default=prefixes.TAIL)
    numbers["cause"] = cause
    return Finding("prefix_misses", head, text, _change(cause, facts), numbers)


def _summed(tenants: Mapping[str, Counts]) -> dict[str, float]:
    total: dict[str, float] = {}
    for counts in tenants.values():
        for outcome, tokens in counts.items():
            total[outcome] = total.get(outcome, 0.0) + tokens
    return total


def misses(told: Counts, hits: float | None) -> dict[str, float]:
    """Missed tokens by cause. `hits`: the engines' own count, which says what became of `repeated`; None leaves it.

    It decides nothing that an answer has told: an engine counts when a prompt is scheduled and the gateway when its
    answer has ended, so at a window's ends the two are about different requests.
    """
    found = {why: told[why] for why in _MISSES if told.get(why)}
    if hits is not None and (repeated := told.get(prefixes.REPEATED, 0.0)):
        left = hits - told.get(prefixes.HIT, 0.0) - repeated
        if left < 0:
            found[prefixes.EVICTED] = found.get(prefixes.EVICTED, 0.0) + min(-left, repeated)
        elif not told.get(prefixes.HIT):  # no answer tells: a chat template's head, say, hit and seemed new
            found[prefixes.FIRST_SEEN] = found.get(prefixes.FIRST_SEEN, 0.0) - left
    return {why: tokens for why, tokens in found.items() if tokens > 0}


def _shares(missed: Counts, total: float, most: int = len(_MISSES)) -> str:
    order = sorted(missed, key=lambda why: -missed[why])[:most]
    return listed([f"{percent(missed[why] / total)} {_WORDS[why]}" for why in order])


def _change(cause: str, facts: Facts) -> str:
    if cause in (prefixes.SHORT, prefixes.TAIL):
        block = max((engine.block_size for engine in facts.engines if engine.block_size), default=None)
        change = (
            f"Nothing is wrong: only whole blocks of {block or 'block-size'} tokens are cached, and shorter ones are "
            "cheap to compute."
        )
        if block and block > LARGE_BLOCK:
            change += f" block-size {block} may be larger than need be: 16 is CUDA's default, 32 the least on a CPU."
        return change
    if cause == prefixes.EVICTED:
        pools = sum(engine.pool_tokens or 0 for engine in facts.engines)
        doubled = f" ({2 * pools:,} tokens instead of {pools:,})" if pools else ""
        return (
            "The pool is smaller than what is reused: raise gpu-memory-utilization or kv-cache-memory-bytes, take "
            f"kv-cache-dtype fp8 where the card has a kernel{doubled}, or add a replica; prefixes keep to theirs."
        )
    return _CHANGES[cause]


_CHANGES = {
    prefixes.FIRST_SEEN: "Put what prompts share (instructions, examples, documents) first and what differs (time, "
    "ids, the question) last. Where prompts are really different, this ratio is as it should be.",
    prefixes.RESTARTED: "Nothing: the cache fills up again as prompts come back. If it repeats, find out what restarts "
    "the engine.",
    prefixes.SALTED: "Keys of one group share the cache: put keys that may know of each other's prompts into one "
    "(make keys).",
    prefixes.ELSEWHERE: "Several replicas computed the same prefix, where one was too loaded or away. Fewer, larger "
    "replicas share more.",
}
