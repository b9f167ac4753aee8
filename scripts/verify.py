"""`make verify`: proves on a running engine that paged KV and prefix caching work, and says by what.

    python -m scripts.verify [ENGINE] [--gateway URL] [--log FILE|-] [--pid PID] [--pairs N] [--json]

It sends a few completions (about 7,500 tokens together) and reads /metrics around them; run it while nothing else
uses the engine. ENGINE defaults to the demo's. Keys: VLLM_API_KEY for the engine, GATEWAY_API_KEY for the gateway.
Exit codes: 0 PASS, 1 FAIL, 3 UNSURE, 2 there was nothing to verify (one line says why) or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts._command import Parser, web_address
from scripts.checks import Check, fail, ok, report, skip, warn
from scripts.checks.probes import ROOT, Probes
from scripts.checks.proof import ProofError, backend, judge, process
from scripts.checks.proof.log import StartLog, parse_log
from scripts.checks.proof.scrape import Scrape
from scripts.checks.proof.traffic import Front, Model, Target, front_at, long_lengths, prefix_length
from scripts.planner import PlanError
from scripts.planner.checkpoint import read_config
from scripts.planner.kv import kv_layout
from scripts.planner.model import parse_model

ENGINE = "http://127.0.0.1:8000"
PAIRS = 5
ATTEMPTS = 3
LOG = judge.LOG


@dataclass(frozen=True)
class Proof:
    """All that was found about one engine."""

    engine: str
    version: str | None
    model: Model
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> tuple[judge.Verdict, str]:
        return judge.verdict(self.checks)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "engine", nargs="?", type=web_address, default=ENGINE, help="the engine's own address (%(default)s)"
    )
    parser.add_argument("--gateway", type=web_address, help="also send a pair through this gateway")
    parser.add_argument("--log", help="the engine's log from its start, - for standard input (default: the demo's)")
    parser.add_argument("--pid", type=int, help="the engine's process, where it can't be told from its port")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="prompts that are sent twice (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not 1 <= args.pairs <= 100:
        parser.error(f"--pairs {args.pairs}: expected 1 to 100")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        with httpx.Client(timeout=30, trust_env=False) as client:
            proof = prove(args, client, Probes(), random.Random())  # noqa: S311 - prompts nobody has sent, no secret
    except ProofError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    verdict, why = proof.verdict
    if args.json:
        about = {"engine": proof.engine, "version": proof.version, "model": proof.model.name}
        result = {**about, "verdict": verdict, "why": why, "checks": [check.as_json() for check in proof.checks]}
        print(json.dumps(result, indent=2))
    else:
        print(f"verify: {proof.engine}, vLLM {proof.version or 'of unknown version'}, {proof.model.name}\n")
        print("\n".join(report.lines(proof.checks)))
        print(f"\n{verdict}: {why}")
    return judge.EXIT_CODES[verdict]


def prove(args: argparse.Namespace, client: httpx.Client, probes: Probes, rng: random.Random) -> Proof:
    """Raises ProofError where there is nothing to verify."""
    target = Target(args.engine, client, rng, os.environ.get("VLLM_API_KEY"))
    target.healthy()
    first = target.scrape()
    model = target.model()
    pid = args.pid if args.pid is not None else process.listener(target.base)
    log, log_check = read_log(args.log, pid, probes.root)
    blocks = judge.pool_blocks(first, log)
    target.learn_ids(model.name)
    target.send(model.name, target.fresh(8), 8)  # the first request of an engine compiles and allocates
    checks = [log_check, judge.judge_blocks(first, log), *prefix(args, target, model, first)]
    on_gpu = process.on_gpu(log, probes)
    checks += load(target, model, first, blocks, process.meter(pid, on_gpu, probes), request_bytes(first, log, model))
    sm = process.card_sm(probes) if on_gpu else None
    version = target.version() or (log.version if log else None)
    checks += [backend.attention(log, version, sm, first.cache_dtype), backend.awq(log)]
    return Proof(target.base, version, model, tuple(checks))


def read_log(given: str | None, pid: int | None, root: Path = ROOT) -> tuple[StartLog | None, Check]:
    """The log and what it proves by itself. Raises ProofError for a file that is no engine's log."""
    expected = "a start-up log with the size of the KV cache"
    path = given or process.find_log(pid, root)
    if path is None:
        why = "none was given (--log FILE, - for standard input; in containers: docker compose logs engine | ...)"
        return None, skip(LOG, expected, why)
    try:
        text = sys.stdin.read() if given == "-" else Path(path).read_text(encoding="utf-8", errors="replace")
        log = parse_log(text)
    except OSError as error:
        raise ProofError(f"--log {path}: {error.strerror}") from None
    except ProofError as error:
        raise ProofError(f"--log {path}: {error}") from None
    if not log.kv_line or not log.whole:
        lacks = "it ends before the size of the KV cache" if not log.kv_line else "it ends before the server came up"
        return log, warn(LOG, expected, f"{path} is cut off: {lacks}", "give the whole log, from the start on")
    if log.pid is not None and pid is not None and log.pid not in {p.pid for p in process.tree(pid)}:
        found = f"{path} is of process {log.pid}, the engine is {pid}"
        return log, warn(LOG, expected, found, "give the log of the engine that is running")
    if log.prefix_caching is False:
        return log, fail(
            LOG, "prefix caching is on", "enable_prefix_caching=False", "start with --enable-prefix-caching"
        )
    concurrency = f", {log.concurrency:g} requests of {log.concurrency_length:,}" if log.concurrency else ""
    tokens = f"{log.tokens:,} tokens" if log.tokens else f"{log.blocks:,} blocks"
    return log, ok(LOG, expected, f"{log.engine or 'V1'}, vLLM {log.version}: {tokens}{concurrency} ({path})")


def prefix(args: argparse.Namespace, target: Target, model: Model, first: Scrape) -> list[Check]:
    """The pairs on the engine, and one through the gateway."""
    if first.block_size is None:
        return [judge.judge_prefix([], first)]
    length = prefix_length(first.block_size, model.max_model_len)
    if length is None:
        why = f"no prompt fills a block of {first.block_size} tokens within max-model-len {model.max_model_len}"
        return [warn(judge.PREFIX, "a prompt sent twice hits", why, "take a smaller block-size")]
    pairs = [_pair(target, model, length, first.block_size) for _ in range(args.pairs)]
    checks = [judge.judge_prefix(pairs, first), judge.judge_ttft(pairs)]
    if args.gateway:
        front = front_at(args.gateway, os.environ.get("GATEWAY_API_KEY"))
        through = _pair(target, model, length, first.block_size, front)
        found = judge.judge_prefix([through], first)
        checks.append(Check("gateway", found.status, f"through it: {found.expected}", found.found, found.fix))
    return checks


def _pair(target: Target, model: Model, length: int, block_size: int, front: Front | None = None) -> judge.Pair:
    """A pair that no other request disturbed, such as a gateway's probe of an idle engine; at the third it stays so."""
    for _ in range(ATTEMPTS - 1):
        pair = target.pair(model.name, length, front)
        if judge.disturbed(pair, block_size) is None:
            return pair
    return target.pair(model.name, length, front)


def load(
    target: Target, model: Model, first: Scrape, blocks: int | None, meter: process.Meter | None, request: int | None
) -> list[Check]:
    """One long request, a second one where the first left the question open: usage, and the process's memory."""
    prompt, answer = long_lengths(model.max_model_len)
    size = request * (prompt + answer) if request is not None else None
    deltas: list[int] = []
    while True:
        before = meter.read() if meter else 0
        held = target.hold(model.name, prompt, answer, blocks)
        if meter:
            deltas.append(meter.read() - before)
        if not meter or len(deltas) > 1 or not judge.needs_second(deltas[0], size):
            break
    usage = judge.judge_usage(held, first, blocks)
    if meter is None:
        why = "the engine's processes are not visible from here (--pid PID)"
        return [usage, skip("memory", "no growth under a long request", why)]
    return [usage, judge.judge_memory(deltas, size, prompt + answer, meter.what)]


def request_bytes(first: Scrape, log: StartLog | None, model: Model) -> int | None:
    """KV bytes of one token: from the model's own config where it lies here, else from the pool and its tokens."""
    try:
        shape = parse_model(read_config(Path(model.root)), model.name)
        layout = kv_layout(shape, first.cache_dtype or "auto", first.block_size or 16, 0)
        return layout.block_bytes // layout.block_size * len(layout.groups)
    except PlanError:
        pool = judge.pool_bytes(first, log)
        tokens = first.tokens or (log.tokens if log else None)
        return round(pool / tokens) if pool and tokens else None


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make ... | head` ends quietly
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # and so does Ctrl-C: nothing here needs tidying up
    sys.exit(main())
