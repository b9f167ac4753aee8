"""How each kind of figure is written, so that the same thing looks the same on every dashboard."""

from scripts.dashboards._panels import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, YELLOW, Look

SECONDS = Look("s")  # Grafana writes 0.015 as 15 ms by itself
RATE = Look("reqps")
TOKENS_RATE = Look("suffix:tok/s", 0)
TOKENS = Look("short", 1)
COUNT = Look("locale", 0)
EVENTS = Look("cps")
SHARE = Look("percentunit", maximum=1)
WATTS = Look("watt", 0)
CELSIUS = Look("celsius", 0)
PROMPTS = Look("short", 1)
# A counter of mishaps: none is good, any is worth a look.
MISHAPS = Look("short", 0, steps=((None, GREEN), (1, YELLOW)))
READY = Look("short", 0, steps=((None, RED), (1, GREEN)), words={"0": ("not ready", RED), "1": ("ready", GREEN)})
CIRCUIT = Look(
    "short",
    0,
    steps=((None, GREEN), (1, ORANGE), (2, RED)),
    words={"0": ("closed", GREEN), "1": ("half open", ORANGE), "2": ("open", RED)},
)
PLAIN = Look("short", 1, steps=((None, BLUE),))

# A label's value -> its colour. Green is what is well; a palette by order would have it for a failure.
STATUSES = {"200": GREEN, "429": YELLOW, "499": GREY, "500": RED, "502": RED, "503": ORANGE, "504": PURPLE}
# A key's own limits are no overload.
REFUSALS = {
    "key_requests": GREY,
    "key_tokens": "light-blue",
    "key_concurrency": BLUE,
    "predicted_wait": YELLOW,
    "waited_too_long": ORANGE,
    "queue_full": "dark-orange",
    "pushed_out": PURPLE,
    "bodies": "light-purple",
    "no_engine": RED,
}
FAILURES = {
    "unreachable": GREY,
    "UpstreamUnreachable": ORANGE,
    "UpstreamTimeout": PURPLE,
    "UpstreamFailed": RED,
    "engine_5xx": "dark-red",
    "engine_error_event": "light-red",
    "broken_stream": "dark-orange",
    "timeout_in_stream": "light-purple",
    "unreadable_stream": "dark-purple",
    "deadline": YELLOW,
    "shutdown": BLUE,
}
ENDS = {"stop": GREEN, "length": BLUE, "abort": GREY, "error": RED, "repetition": PURPLE}
WAITS = {"capacity": ORANGE, "deferred": GREY}
PHASES = {"reading": GREY, "queued": ORANGE, "waiting": PURPLE, "streaming": BLUE}
