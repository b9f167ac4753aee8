"""What limits the stack now, by how much, and the change worth trying. Pure: `Facts` in, `Finding`s out, "
"gravest first.

The gateway's /status and `make advise` use these same rules. What nothing is known about is not judged. Nothing here
ever suggests what makes things worse (docs/advise.md has the list, a test reads every sentence for it).
"""

from collections.abc import Sequence

from gateway import advice_engine, advice_gateway
from gateway.advice_gateway import FEW_REQUESTS
from gateway.advice_prefix import prefix_cache
from gateway.facts import Facts
from gateway.findings import KINDS, Finding, count
from gateway.wording import several

_ORDER = list(KINDS)


def advise(facts: Facts) -> list[Finding]:
    """Every finding that holds; at least one."""
    found = advice_engine.presence(facts)
    for engine in facts.engines:
        if engine.seen and engine.stats:
            found += [*advice_engine.kv_cache(engine), *advice_engine.slots(engine)]
            found += advice_engine.api_server(engine, facts)
    found += prefix_cache(facts)
    found += [*advice_gateway.queue(facts), *advice_gateway.hog(facts), *advice_gateway.window(facts)]
    if not any(finding.severity != "info" for finding in found):
        found.append(_quiet(facts))
    return sorted(found, key=lambda finding: _ORDER.index(finding.kind))


def current(findings: Sequence[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


def _quiet(facts: Facts) -> Finding:
    """Nothing limits: because nothing is asked for, or because everything keeps up."""
    engines, gateway = facts.engines, facts.gateway
    requests = sum(gateway.requests.values()) if gateway else sum(engine.requests for engine in engines)
    tokens = sum(engine.prompt_tokens + engine.generation_tokens for engine in engines)
    running = sum(engine.running_mean for engine in engines)
    numbers = {"requests": requests, "tokens": tokens, "running_mean": running, "seconds": facts.seconds}
    if requests < FEW_REQUESTS and running < 1:
        said = f"{several(requests, 'request', count(requests))} in {count(facts.seconds)} s."
        return Finding("idle", "Nothing limits: there is hardly anything to do.", said, "Nothing.", numbers)
    pace = tokens / facts.seconds if facts.seconds else 0.0
    asked = several(requests, "request", count(requests))
    said = f"{asked}, {count(pace)} tokens a second, {count(running)} running on average."
    return Finding("no_limit", "Nothing limits: the stack keeps up with what is asked.", said, "Nothing.", numbers)
