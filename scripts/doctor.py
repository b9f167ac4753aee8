"""`make doctor`: looks at host, Docker, card, model, settings and the running stack, and says what to mend.

    python -m scripts.doctor [--for demo|stack] [--profile NAME] [--model DIR] [--only GROUP,...] [--json]

Reads only. What can't be looked at here is "not checked", with the reason, and never counts as well.
Exit codes, by the worst finding: 0 all well or not checked, 3 something to mind, 1 something failed, 2 wrong usage.
(`make doctor` itself fails for 1 and 2 only.)
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence

from scripts._command import Parser
from scripts.checks import EXIT_CODES, Check, alerts, docker, gpu, host, model, report, settings, stack, worst
from scripts.checks.probes import Probes
from scripts.checks.subject import Subject, SubjectError, decide

GROUPS: dict[str, Callable[[Probes, Subject], list[Check]]] = {
    "host": host.checks,
    "docker": docker.checks,
    "gpu": gpu.checks,
    "model": lambda _, subject: model.checks(subject),
    "settings": settings.checks,
    "stack": stack.checks,
    "alerts": alerts.checks,
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="purpose", choices=("demo", "stack"), help="default: stack where there is a .env")
    parser.add_argument(
        "--profile", help="engine profile, its file or its name (default: ENGINE_PROFILE, or the demo's)"
    )
    parser.add_argument("--model", help="model directory (default: the profile's, under MODELS_DIR)")
    parser.add_argument("--only", help=f"a few of {','.join(GROUPS)}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else list(GROUPS)
    if unknown := [name for name in args.only if name not in GROUPS]:
        parser.error(f"--only {unknown[0]}: expected some of {','.join(GROUPS)}")
    return args


def examine(probes: Probes, subject: Subject, groups: Sequence[str]) -> list[Check]:
    """All checks of the groups, in the order of GROUPS."""
    return [check for name, checks in GROUPS.items() if name in groups for check in checks(probes, subject)]


def main(argv: Sequence[str] | None = None, probes: Probes | None = None) -> int:
    args = parse_args(argv)
    eyes = probes or Probes()
    try:
        subject = decide(eyes, args.purpose, args.profile, args.model)
    except SubjectError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    found = examine(eyes, subject, args.only)
    if args.json:
        about = {"purpose": subject.purpose, "profile": subject.profile_path.stem, "worst": worst(found)}
        print(json.dumps({**about, "checks": [check.as_json() for check in found]}, indent=2))
    else:
        print(f"doctor: {subject.describe()}\n")
        print("\n".join(report.lines(found)))
        print(f"\n{report.summary(found)}")
    return EXIT_CODES[worst(found)]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make ... | head` ends quietly
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # and so does Ctrl-C: nothing here needs tidying up
    sys.exit(main())
