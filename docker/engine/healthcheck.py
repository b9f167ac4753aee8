"""The engine container's health, as the supervisor sees it. Exit code 0 healthy, 1 not (one line says why).

Standard library alone, and run with -I -S: it runs every few seconds, beside the engine's own work.
"""

import json
import os
import sys
import time
from pathlib import Path

STALE_S = 60  # one look may wait for a slow engine's answers, three times five seconds


def verdict(path: Path, now: float) -> tuple[int, str]:
    """The exit code and what to say."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        state, cause, at = str(report["state"]), str(report["cause"]), float(report["at"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1, "starting"
    if now - at > STALE_S:
        return 1, f"the supervisor has not looked for {now - at:.0f} s"
    return (0, "ready") if state == "ready" else (1, f"{state}: {cause}" if cause else state)


if __name__ == "__main__":
    code, text = verdict(Path(os.environ.get("ENGINE_STATE_FILE", "/tmp/engine-state.json")), time.time())  # noqa: S108
    print(text)
    sys.exit(code)
