"""The running stack as the scripts that change it see it: its engine's container, and its gateway from inside.

What is asked of engine and admin port goes through the gateway's container: neither is published, and the keys for both
are secrets of that container.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts._compose import Compose, ComposeError, Container, failure

Variables = Mapping[str, str]  # of compose.yaml; empty where only files changed

# The two engines, and the variable that names the image of each.
ENGINES = {"engine": "ENGINE_IMAGE", "engine-cpu": "ENGINE_CPU_IMAGE"}
TRIES = 3
_FAILED = re.compile(
    r"^supervisor: (?:gave up: )?((?:the engine (?:did not start|refuses)|killing).*?)(?:; starting it again.*)?$"
)
_INSIDE = Path(__file__).with_name("_gateway_side.py").read_text(encoding="utf-8")


class SwapError(Exception):
    """The swap did not hold, or could not begin; one line says why. The stack serves what it served before."""


def ask(compose: Compose, to: str, method: str, path: str, body: Any = None, timeout_s: float = 30) -> tuple[int, str]:
    """One request from inside the gateway's container to `engine` or `admin`: status and text.

    Status 0: nobody answered, or that container could not be entered; the text says which.
    """
    order = json.dumps({"to": to, "method": method, "path": path, "body": body, "timeout_s": timeout_s})
    try:
        said = compose.run("exec", "-T", "gateway", "python", "-c", _INSIDE, order)
        answer = json.loads(said.splitlines()[-1])
        return int(answer["status"]), str(answer["text"])
    except ComposeError as error:
        return 0, str(error)
    except (ValueError, LookupError):  # it was killed before it said all
        return 0, "the gateway's container went away"


class Stack:
    """The running stack: its engine and its gateway. Made by `running`."""

    def __init__(self, compose: Compose, engine: Container, pause: Callable[[float], object] | None = None) -> None:
        self.compose = compose
        self.engine = engine
        self.pause = pause or threading.Event().wait

    @classmethod
    def running(cls, compose: Compose | None = None, interrupted: bool = False) -> Stack:
        """`interrupted`: after a change that was killed, the engine may have been stopped and not started again.

        Raises SwapError where engine or gateway do not run, ComposeError where Docker can't be asked.
        """
        compose = compose or Compose()
        found = compose.containers()
        engines = [each for each in found if each.service in ENGINES and (each.running or interrupted)]
        gateway = any(each.service == "gateway" and each.running for each in found)
        if not engines or not gateway:
            missing = " and ".join((["the engine"] if not engines else []) + (["the gateway"] if not gateway else []))
            raise SwapError(f"{missing} of this stack: not running; make up (or make up-cpu) first")
        return cls(compose, max(engines, key=lambda each: each.running))

    # -- through the gateway's container -------------------------------------------------------------------------------

    def ask(self, to: str, method: str, path: str, body: Any = None, timeout_s: float = 30) -> tuple[int, str]:
        """As the function `ask`, of this stack."""
        return ask(self.compose, to, method, path, body, timeout_s)

    def replica(self) -> Mapping[str, Any]:
        """The gateway's own view of the engine: url, state, reason, calls. Raises SwapError where it can't be asked."""
        status, text = self.ask("admin", "GET", "/status")
        if status != 200:
            raise SwapError(f"the gateway's admin port answered {status}: {text[:200]}")
        found: Mapping[str, Any] = json.loads(text)["replicas"][0]
        return found

    def drain(self, on: bool) -> None:
        """The gateway stops, or resumes, sending to the engine. Raises SwapError."""
        status, text = self.ask("admin", "POST", "/drain", {"replica": self.replica()["url"], "on": on})
        if status != 200:
            order = "hold requests back" if on else "send again"
            raise SwapError(f"the gateway did not take the order to {order}: {status} {text[:200]}")

    @property
    def same(self) -> Variables:
        """The variables that made the engine's container what it was when we came: .env may say something else."""
        asked = {name: self.engine.env.get(name, "") for name in ("ENGINE_PROFILE", "ENGINE_ARGS")}
        return asked | {ENGINES[self.engine.service]: self.engine.image}

    # -- the engine's container ----------------------------------------------------------------------------------

    def make_anew(self, variables: Variables) -> None:
        """Stops the engine's container and starts another one, alike but for these variables. Raises ComposeError."""
        compose = Compose(self.compose.profiles, {**self.compose.env, **self.same, **variables})
        for attempt in range(TRIES):
            try:
                compose.run("up", "--detach", "--no-build", "--no-deps", "--force-recreate", self.engine.service)
                return
            except ComposeError:  # what a killed change had begun may still be at it, and gets in our way
                if attempt == TRIES - 1:
                    raise
            self.pause(5)

    def container(self) -> Container | None:
        return next((each for each in self.compose.containers() if each.service == self.engine.service), None)

    def failed(self, container: Container) -> str | None:
        """Why this start failed. The first failure decides: clients are waiting."""
        if broken := failure([container]):
            return broken[1]
        for line in self.compose.tail(container.service, 40):
            if found := _FAILED.match(line):
                return found[1]
        return None
