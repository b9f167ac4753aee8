"""Stops this stack's engine for the length of a job, and starts it again however the job ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scripts._compose import Compose, ComposeError
from scripts.quantization import QuantizeError

WAIT_S = 1800
_ENGINES = ("engine", "engine-cpu")


@contextmanager
def stopped(
    compose: Compose, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Raises QuantizeError where there is no running engine to stop, or Docker is not to be had."""
    try:
        running = [found for found in compose.containers() if found.service in _ENGINES and found.running]
        if not running:
            raise QuantizeError("--stop-engine: no engine of this stack runs; what holds the card is another program")
        (name, *_) = (found.service for found in running)
        began = clock()
        say(f"stopping {name}: requests wait or get 503 until it is ready again")
        compose.run("stop", name)
    except ComposeError as error:
        raise QuantizeError(f"--stop-engine: {error}") from None
    try:
        yield
    finally:
        try:
            say(f"starting {name} again")
            compose.run("start", name)
            ready = _ready(compose, name, clock)
            away = f"{clock() - began:.0f} s"
            say(f"{name} is ready; it was away for {away}" if ready else f"{name} is not ready after {away}: make ps")
        except ComposeError as error:
            say(f"{name} could not be started ({error}): make up")


def _ready(compose: Compose, name: str, clock: Callable[[], float]) -> bool:
    until = clock() + WAIT_S
    while clock() < until:
        found = [each for each in compose.containers() if each.service == name]
        if found and found[0].well:
            return True
        time.sleep(2)
    return False
