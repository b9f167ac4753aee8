"""What the gateway's own figures say: its queue, refusals, the micro-batching window, who takes how much. Pure."""

from gateway.facts import Facts, GatewayFacts
from gateway.findings import Finding, count, listed, percent

QUEUE_CAUSES = ("predicted_wait", "waited_too_long", "queue_full", "pushed_out")
WORTH_S = 0.5  # mean wait in the queue that is worth a word
HOG = 0.6  # of all tokens by one key, while others are held up
WINDOW_WAITS = 20  # requests that must have waited for company before the window is judged
MERGED = 0.1  # of them must have found company
FEW_REQUESTS = 10  # in a window: nothing can be concluded
OVER_RESERVED = 0.5  # of the reserved tokens used at the most


def queue(facts: Facts) -> list[Finding]:
    """Requests wait for admission or are refused for it."""
    gateway = facts.gateway
    if gateway is None:
        return []
    own = {cause: gateway.shed.get(cause, 0.0) for cause in QUEUE_CAUSES}
    own["predicted_wait"] -= gateway.deadline_shed  # those are another finding's
    shed = {cause: n for cause, n in own.items() if n > 0}
    refused = sum(shed.values())
    wait_s = gateway.queue_wait_s / gateway.queue_waits if gateway.queue_waits else 0.0
    found = []
    if refused > 0 or gateway.queued_mean >= 1 or wait_s >= WORTH_S:
        found.append(_queue(facts, gateway, shed, wait_s))
    if gateway.deadline_shed:
        longest = gateway.settings.get("max_wait_s")
        allowed = f" The gateway itself would have let them wait {longest:g} s." if longest else ""
        found.append(
            Finding(
                "deadline_sheds",
                "Clients ask for answers sooner than the queue can be passed.",
                f"{count(gateway.deadline_shed)} of {count(sum(gateway.requests.values()))} requests were refused "
                f"because the wait would have passed their own X-Request-Timeout-S.{allowed}",
                f"Let those clients allow for the queue (now {wait_s:.1f} s on average), or add a replica.",
                {"refused": gateway.deadline_shed, "mean_wait_s": wait_s},
            )
        )
    return found


def _queue(facts: Facts, gateway: GatewayFacts, shed: dict[str, float], wait_s: float) -> Finding:
    asked = sum(gateway.requests.values())
    refused = sum(shed.values())
    causes = f" ({listed([f'{count(n)} {cause}' for cause, n in shed.items()])})" if shed else ""
    pool = sum(engine.pool_tokens or 0 for engine in facts.engines)
    used = max((engine.usage_max or 0.0 for engine in facts.engines), default=0.0)
    numbers = {
        "refused": refused,
        "requests": asked,
        "mean_wait_s": wait_s,
        "queued_max": gateway.queued_max,
        "in_flight_max": gateway.in_flight_max,
        "in_flight_tokens_max": gateway.in_flight_tokens_max,
        "capacity_tokens": gateway.capacity_tokens,
        **shed,
    }
    limit, change = _which_limit(gateway, pool, used, asked, refused, shed)
    return Finding(
        "gateway_queue",
        limit,
        f"{count(refused)} of {count(asked)} requests were refused{causes}; the others waited {wait_s:.1f} s on "
        f"average, up to {count(gateway.queued_max)} at a time.",
        change,
        numbers,
    )


def _which_limit(
    gateway: GatewayFacts, pool: int, used: float, asked: float, refused: float, shed: dict[str, float]
) -> tuple[str, str]:
    """What holds requests back, and the change for it. Cases from the cheapest remedy to the dearest."""
    settings, capacity, tokens = gateway.settings, gateway.capacity_tokens, gateway.in_flight_tokens_max
    served = percent(1 - refused / asked if asked else 1)
    limit = f"Requests wait in the gateway for tokens: up to {count(tokens)} of {count(capacity)} were in flight."
    change = f"More engines, or fewer requests: {served} of what was asked got through."
    most, configured = settings.get("max_in_flight", 0.0), settings.get("capacity_tokens", 0.0)
    if most and gateway.in_flight_max >= most:
        limit = f"Requests wait in the gateway for its own limit of {count(most)} in flight."
        taken = percent(tokens / capacity if capacity else 0)
        change = f"Raise admission.max_in_flight above {count(most)}: {taken} of the token capacity was taken."
    elif configured and configured < 0.95 * pool:
        change = f"Unset admission.capacity_tokens ({count(configured)}): the engines' KV caches hold {pool:,} tokens."
    elif pool and tokens and used * pool < OVER_RESERVED * tokens:
        change = (
            f"Clients reserve more than they use: at most {count(used * pool)} of these tokens were in use at once."
            " Have them send a max_tokens near what answers take, or set admission.assumed_answer_tokens lower."
        )
    elif shed.get("queue_full", 0.0) + shed.get("pushed_out", 0.0) > refused / 2:
        room = count(settings.get("max_queue_tokens", 0.0))
        limit = f"The gateway's queue is full at {room} tokens (admission.max_queue_tokens)."
        change = (
            f"More engines: {served} of what was asked got through. A longer queue (admission.max_queue_tokens) only "
            "helps where this was a burst."
        )
    return limit, change


def hog(facts: Facts) -> list[Finding]:
    """One key takes most of it while others are held up."""
    gateway = facts.gateway
    if gateway is None or len(gateway.requests) < 2 or not gateway.tokens:
        return []
    total = sum(gateway.tokens.values())
    name = max(gateway.tokens, key=lambda tenant: gateway.tokens[tenant])
    share = gateway.tokens[name] / total
    others = sum(n for tenant, n in gateway.shed_of.items() if tenant != name)
    if share < HOG or (not others and gateway.queued_mean < 1):
        return []
    rate = gateway.tokens[name] * 60 / facts.seconds if facts.seconds else gateway.tokens[name]
    return [
        Finding(
            "tenant_hog",
            f"The key {name} takes most of the stack while others are held up.",
            f"{percent(share)} of {count(total)} tokens were its own; {count(others)} requests of others were refused.",
            f"Give it a smaller weight, or tokens_per_minute: {int(rate / 2):,} (half of what it takes), by make keys.",
            {"key": name, "share": share, "tokens_per_minute": rate, "others_refused": others},
        )
    ]


def window(facts: Facts) -> list[Finding]:
    """The micro-batching window makes requests wait, and nothing comes of it."""
    gateway = facts.gateway
    if gateway is None or gateway.window_waits < WINDOW_WAITS or gateway.merged >= MERGED * gateway.window_waits:
        return []
    mean_ms = 1000 * gateway.window_wait_s / gateway.window_waits
    return [
        Finding(
            "idle_window",
            "The micro-batching window makes requests wait and gains nothing.",
            f"{count(gateway.window_waits)} requests waited {mean_ms:.1f} ms each on average; {count(gateway.merged)} "
            "of them found others to share a call with.",
            "Set batching.window_ms: 0. Merging needs short, alike completions that arrive together.",
            {"waited": gateway.window_waits, "mean_wait_ms": mean_ms, "merged": gateway.merged},
        )
    ]
