"""How each kind of figure is written, so that the same thing looks the same on every dashboard."""

from scripts.dashboards._panels import BLUE, GREEN, ORANGE, RED, YELLOW, Look

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
