"""`make advise`: what limits the stack now, by how much, and the change worth trying.

    python -m scripts.advise [--prometheus URL] [--gateway-admin URL] [--engine URL ...] [--window S] [--json]

Reads only. Where it reads: the Prometheus given; else one on 127.0.0.1:9090 that has our series; else the gateway's
admin page and the engines' pages, scraped every second for a short window. --profile NAME adds the memory plan's
numbers where more KV cache is advised. --watch S says it again every S seconds, until Ctrl-C.
Exit codes: 0 nothing limits; 1 something does, and it was said; 2 nothing to read, or wrong usage (one line says why).
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

import httpx

from gateway.advice import advise
from gateway.findings import Finding
from gateway.readings import facts
from scripts._command import Parser, web_address
from scripts.advising import SourceError, plans, render, sources
from scripts.planner import PlanError

PROMETHEUS = "http://127.0.0.1:9090"
ADMIN = "http://127.0.0.1:9000"
PROMETHEUS_WINDOW_S, SCRAPED_WINDOW_S = 300.0, 15.0


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("advise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prometheus", type=web_address, metavar="URL", help=f"read this one (else {PROMETHEUS}, if there is one)"
    )
    parser.add_argument(
        "--gateway-admin", type=web_address, metavar="URL", help=f"scrape the gateway's admin address ({ADMIN})"
    )
    parser.add_argument(
        "--engine",
        type=web_address,
        metavar="URL",
        action="append",
        help="scrape this engine (those the gateway names)",
    )
    parser.add_argument("--window", metavar="S", type=float, help="seconds to look at (Prometheus 300, scraping 15)")
    parser.add_argument("--profile", metavar="NAME", help="the engine's profile in configs/engine, for the memory plan")
    parser.add_argument("--watch", metavar="S", type=float, help="again every S seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    for name in ("window", "watch"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 86400:
            parser.error(f"--{name} {value:g}: expected 1 to 86400 seconds")
    if args.prometheus and (args.gateway_admin or args.engine):
        parser.error("give either --prometheus, or the addresses to scrape")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        with httpx.Client(timeout=10, trust_env=False) as client:
            while True:
                findings = look(args, client)
                if args.watch is None:
                    return 1 if any(finding.severity != "info" for finding in findings) else 0
                print(flush=True)
                time.sleep(args.watch)
    except (SourceError, PlanError) as error:
        print(f"advise: {error}", file=sys.stderr)
        return 2


def look(args: argparse.Namespace, client: httpx.Client) -> list[Finding]:
    """One window, judged and printed. Raises SourceError, PlanError."""
    prometheus = args.prometheus
    if not prometheus and not args.gateway_admin and not args.engine:
        prometheus = PROMETHEUS if sources.answers_as_prometheus(client, PROMETHEUS) else None
    if prometheus:
        source = prometheus
        readings = sources.from_prometheus(client, prometheus, args.window or PROMETHEUS_WINDOW_S)
    else:
        admin = args.gateway_admin or (None if args.engine else ADMIN)
        source = ", ".join(url for url in (admin, *(args.engine or ())) if url)
        readings = sources.from_pages(client, admin, args.engine or (), args.window or SCRAPED_WINDOW_S)
    findings = advise(facts(readings))
    if args.profile:
        findings = plans.planned(findings, args.profile)
    show = render.as_json if args.json else render.text
    print(show(findings, source, sources.seconds(readings)))
    return findings


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make ... | head` ends quietly
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # and so does Ctrl-C: nothing here needs tidying up
    sys.exit(main())
