"""The engine's container: runs `vllm serve` with one profile, restarts it when it dies or hangs, and says why.

    python3 /opt/stack/engine        settings come from the environment, below

1. Starts the engine and copies what it says to the container's log.
2. It is ready once it answered a one-token request, and from then on watched for forward progress (watchdog.py).
3. An engine that ended or hung is started again; one that never came up only a few times (restarts.py). Then the
   container stays, unhealthy, with the cause in its health check and its log, and does not burn the machine.
4. SIGTERM is handed to the engine, which finishes its requests (shutdown-timeout); a second one cuts that short.

    ENGINE_PROFILE       the file /configs/engine/<profile>.yaml (required)
    ENGINE_ARGS          more arguments for `vllm serve`, as a shell would split them
    ENGINE_API_KEY_FILE  file with the key clients of the engine must send; unset or empty file: none
    ENGINE_STALL_S       no forward progress for so long is a hang (60); the gateway's timeouts.stall_s
    ENGINE_IDLE_PROBE_S  an idle engine is asked for one token this often (30)
    ENGINE_START_S       longest start, loading and first compilation included (1800)
    ENGINE_MAX_STARTS    failed starts in a row before it gives up (3)

Exit codes: 0 stopped by a signal, 1 a setting can't be used.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the gateway's package is mounted

from config import Config, ConfigError, read_config
from process import Engine
from restarts import Ended, GiveUp, Restarts
from watchdog import Watchdog

STATE = Path(os.environ.get("ENGINE_STATE_FILE", "/tmp/engine-state.json"))  # noqa: S108 - the container's own tmpfs
LOOK_S = 1.0


class Supervisor:
    """Owns the one engine of this container. `run` returns when a signal ended it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._restarts = Restarts(config.max_starts)
        self._stop = threading.Event()
        self._signals = 0
        self._starts = 0

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        while not self._stop.is_set():
            ended = self._one_engine()
            if self._stop.is_set():
                break
            decision = self._restarts.after(ended, time.monotonic())
            if isinstance(decision, GiveUp):
                self._say(f"gave up: {decision.why}")
                while not self._stop.is_set():
                    self._record("gave up", decision.why)
                    self._stop.wait(LOOK_S)
            else:
                self._say(f"{decision.why}; starting it again in {decision.delay_s:.0f} s")
                self._record("restarting", decision.why)
                self._stop.wait(decision.delay_s)
        return 0

    def _one_engine(self) -> Ended:
        config = self._config
        self._starts += 1
        self._say(f"start {self._starts}: {shlex.join(config.command)}")
        began = time.monotonic()
        engine = Engine(config.command, {"VLLM_API_KEY": config.api_key} if config.api_key else {})
        watchdog = Watchdog(config.port, config.api_key, config.stall_s, config.idle_probe_s, time.monotonic)
        ready, why = False, ""
        while engine.code is None:
            if self._stop.is_set():
                self._finish(engine)
                break
            watchdog.look()
            if watchdog.ready and not ready:
                ready = True
                self._say(f"ready after {time.monotonic() - began:.0f} s")
            why = watchdog.verdict() or ""
            if not ready and time.monotonic() - began > config.start_s:
                why = f"not ready after {config.start_s:.0f} s (ENGINE_START_S)"
            if why:
                self._say(f"killing the engine: {why}")
                break
            self._record("ready" if ready and watchdog.answering else "not answering" if ready else "starting", "")
            self._stop.wait(LOOK_S)
        engine.kill()  # what it started may have outlived it
        return Ended(engine.code or 0, ready, why, engine.tail(), engine.oom_killed())

    def _signalled(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        self._stop.set()

    def _finish(self, engine: Engine) -> None:
        """Lets it end its requests. Whoever stops the container bounds that; a second signal cuts it short."""
        self._say("stopping")
        engine.send(signal.SIGTERM)
        while engine.code is None and self._signals < 2:
            time.sleep(0.1)

    def _record(self, state: str, cause: str) -> None:
        """For the health check, which is another process: what the engine is, and that we still look."""
        report = {"state": state, "cause": cause, "starts": self._starts, "at": time.time()}
        part = STATE.with_suffix(".part")
        part.write_text(json.dumps(report), encoding="utf-8")
        part.replace(STATE)

    def _say(self, text: str) -> None:
        print(f"supervisor: {text}", flush=True)


def main() -> int:
    try:
        config = read_config(dict(os.environ))
    except ConfigError as error:
        print(f"supervisor: {error}", file=sys.stderr)
        return 1
    return Supervisor(config).run()


if __name__ == "__main__":
    sys.exit(main())
