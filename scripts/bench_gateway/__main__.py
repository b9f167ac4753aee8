"""What the gateway adds to a request, and what it costs, beside no gateway, vllm-router and LiteLLM's proxy.

One machine, one run, every party in turn, several rounds: added latency at one in flight and at an open-loop rate,
requests and relayed events per CPU-second of all a party's processes, memory idle and with open streams. Each answer
is checked to the word, and the source's count against the load's, or the figures are void. No figure of a GPU.

    make bench-gateway ARGS='--peers --json docs/benchmarks'
    python -m scripts.bench_gateway [--rounds 3] [--seconds 2] [--json FILE_OR_FOLDER]
    python -m scripts.bench_gateway --no-peers --beside DIR     # what did a change bring? DIR: the version before it
    python -m scripts.bench_gateway --docs [--check]     # docs/benchmarks.md from the reports, nothing measured

The peers live in .venv-peers (`make .venv-peers/.installed`); another interpreter that has them: --peer-python, or
BENCH_PEER_PYTHON. Without them they are left out; --peers insists.

Exit codes: 0 measured, whatever the aims say, or with --check up to date; 1 something did not start, an answer was
wrong, a peer that was insisted on is missing, or the page is out of date; 2 wrong usage.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import aiohttp
import uvloop

from gateway.wording import several
from scripts._children import Terminated, raise_on_termination
from scripts._command import Parser
from scripts.bench_gateway import parties, report
from scripts.bench_gateway.load import LoadError
from scripts.bench_gateway.measure import dump, measure
from scripts.bench_gateway.starting import Plan

PAGE, REPORTS = Path("docs/benchmarks.md"), Path("docs/benchmarks")
PEER_PYTHON = ".venv-peers/bin/python"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench-gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2, help="a party's time for one kind of load in a round")
    parser.add_argument("--rate", type=float, default=200, help="open loop, requests a second")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 256], metavar="N", help="closed loop")
    parser.add_argument("--streams", type=int, default=64, help="that run side by side")
    parser.add_argument("--step-ms", type=float, default=5, help="between two writes of a stream")
    parser.add_argument("--per-write", type=int, nargs="+", default=[1, 8], metavar="N", help="events a write")
    parser.add_argument(
        "--flood", type=int, nargs=2, default=[5000, 8], metavar=("EVENTS", "N"), help="unpaced: events, N a write"
    )
    parser.add_argument("--held", type=int, default=1000, help="streams open at once when memory is looked at")
    parser.add_argument("--python", default=sys.executable, help="the gateway's interpreter")
    parser.add_argument("--peer-python", default=os.environ.get("BENCH_PEER_PYTHON", PEER_PYTHON))
    parser.add_argument("--peers", action="store_true", help="fail where a peer is missing")
    parser.add_argument("--no-peers", action="store_true", help="leave them out")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="also measure the gateway of this checkout")
    parser.add_argument("--json", type=Path, help="write the whole result here")
    parser.add_argument("--docs", action="store_true", help="only write the page from the reports")
    parser.add_argument("--check", action="store_true", help="with --docs: write nothing, say whether it is up to date")
    options = parser.parse_args(arguments)
    numbers = [options.rounds, options.seconds, options.rate, options.streams, options.step_ms, options.held]
    if min([*numbers, *options.in_flight, *options.per_write, *options.flood]) <= 0:
        parser.error("every number must be above 0")
    if options.json is not None and not options.json.is_dir() and not options.json.parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    if options.beside is not None and not (options.beside / "gateway/__main__.py").is_file():
        parser.error(f"--beside {options.beside}: no checkout with a gateway in it")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    peers = {} if options.no_peers else parties.versions(options.peer_python)
    return Plan(
        rounds=options.rounds,
        seconds=options.seconds,
        rate=options.rate,
        in_flight=tuple(options.in_flight),
        streams=options.streams,
        step_ms=options.step_ms,
        per_write=tuple(options.per_write),
        flood=tuple(options.flood),
        held=options.held,
        python=options.python,
        peer_python=options.peer_python,
        peers=peers,
        beside=str(options.beside.resolve()) if options.beside else None,
    )


def write_page(check: bool) -> int:
    found = sorted(REPORTS.glob("gateway-peers.*.json"), key=lambda path: (len(path.name), path.name), reverse=True)
    sections = [report.section(json.loads(path.read_text()), f"benchmarks/{path.name}") for path in found]
    text = PAGE.read_text()
    page = report.page(text, sections)
    if check:
        if page != text:
            print(f"{PAGE} is out of date: run `python -m scripts.bench_gateway --docs`", file=sys.stderr)
        return int(page != text)
    PAGE.write_text(page)
    print(f"{PAGE}: {several(len(sections), 'run')}")
    return 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.docs:
        return write_page(options.check)
    plan = plan_of(options)
    missing = [] if options.no_peers else [name for name in parties.PEERS if name not in plan.peers]
    if missing:
        say(f"bench-gateway: without {' and '.join(missing)}; `make bench-gateway ARGS=--peers` installs them")
        if options.peers:
            return 1
    where = plan.cores()
    say(f"{', '.join(plan.names())}: {several(plan.rounds, 'round')}; cores {where} of {os.cpu_count()}")
    raise_on_termination()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measure(plan, say))
    except (RuntimeError, LoadError, TimeoutError, aiohttp.ClientError) as error:
        say(f"bench-gateway: {error or type(error).__name__}")
        return 1
    except (KeyboardInterrupt, Terminated):
        say("bench-gateway: stopped; nothing was written")
        return 1
    if options.json is not None:
        say(f"wrote {dump(result, options.json)}")
    print(report.section(result, "…"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
