"""`python -m gateway`: serve the public and the admin address until SIGTERM or SIGINT, from one process or several
(setting `workers`).

The first signal drains: readiness off, new requests refused with 503, those in flight finished, at the longest
timeouts.drain_s. A second one stops at once. Settings come from a file and the environment (docs/settings.md).

Exit codes: 0 stopped by a signal; 1 a setting, a file it names or an address can't be used (one line a mistake), or
workers can't be started; 2 wrong usage.
"""

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

from gateway.listening import bind
from gateway.logs import LineWriter, configure
from gateway.settings import SettingsError, load


def stop_early(number: int, frame: FrameType | None) -> NoReturn:
    """Before anything is served a signal just ends the process, PID 1 of a container included."""
    raise SystemExit(0)


def tell(error: SettingsError) -> None:
    for line in str(error).splitlines():
        print(f"gateway: {line}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_early)
    parser = argparse.ArgumentParser(
        "python -m gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    log: LineWriter | None = None
    try:
        settings = load()
        if settings.workers > 1:
            from gateway import supervisor  # neither path loads what the other needs

            return supervisor.run(settings)
        from gateway import serving

        log = configure(settings.logs.level)
        public = bind(settings.listen, "listen")
        admin = bind(settings.admin_listen, "admin_listen")
        serving.run(settings, public, admin, log)
    except SettingsError as error:
        tell(error)
        return 1
    finally:
        if log is not None:
            log.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
