"""`make plan MODEL=... GPU=...`: how much of the card goes where, and how many tokens of KV cache are left.

Exit codes: 0 the plan fits (and, with --verify, agrees with the engine); 1 it does not fit, or the engine differs by
more than --tolerance; 2 bad input, or a case the planner does not know.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from scripts._command import Parser, web_address
from scripts.planner import PlanError
from scripts.planner.catalog import find_model
from scripts.planner.gpus import Gpu, find_gpu, load_gpus
from scripts.planner.instead import instead
from scripts.planner.memory import Part, Plan, plan_cpu, plan_gpu
from scripts.planner.model import Model
from scripts.planner.numbers import GIB, positive_float, positive_int
from scripts.planner.render import ENDLESS, NARROWEST, as_json, fitted, text, verdict
from scripts.planner.settings import (
    PROFILES,
    Settings,
    apply_profile,
    checked,
    default_settings,
    profile_path,
    read_profile,
)
from scripts.planner.suggest import profile_text, suggest
from scripts.planner.svg import svg
from scripts.planner.verify import Report, fetch_report

_OPTIONS = {
    "utilization": "gpu-memory-utilization",
    "max_model_len": "max-model-len",
    "max_num_seqs": "max-num-seqs",
    "max_num_batched_tokens": "max-num-batched-tokens",
    "block_size": "block-size",
    "kv_cache_dtype": "kv-cache-dtype",
    "attention_backend": "attention-backend",
}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("plan", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a model directory, or a name (downloaded, or a shape that ships here)")
    parser.add_argument("--gpu", help="a card of configs/gpus.yaml, or cpu")
    parser.add_argument("--profile", help="a profile: its file, or its name in configs/engine")
    parser.add_argument("--utilization", help="gpu-memory-utilization")
    for option in ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "block-size"):
        parser.add_argument(f"--{option}", help="as vLLM spells it; 8k is 8000, 8K is 8192")
    parser.add_argument("--kv-cache-dtype", help="auto or fp8")
    parser.add_argument("--attention-backend", help="as vLLM spells it")
    parser.add_argument("--kv-cache-gib", help="a pool of this size (the CPU build's VLLM_CPU_KVCACHE_SPACE)")
    parser.add_argument("--total-gib", help="the card's memory as your engine logged it at start-up")
    parser.add_argument("--used-gib", default="0", help="what other programs (a desktop) hold of the card")
    parser.add_argument("--contexts", help="request lengths to show (1024,2048,4096,8192)")
    parser.add_argument("--verify", type=web_address, metavar="URL", help="compare with the engine running there")
    parser.add_argument("--tolerance", default="2", help="percent the engine may differ by (2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", metavar="FILE", help="also draw the bar into FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return run(args)
    except PlanError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    profile_path, model_name, gpu_name = _subject(args)
    model, weights = find_model(model_name)
    gpu = None if gpu_name.lower() == "cpu" else _card(args, gpu_name)
    report = _report(args.verify) if args.verify else None
    settings = _settings(args, profile_path, model, gpu, report)
    used = round(positive_float(args.used_gib, "--used-gib", zero=True) * GIB)
    again = _planner(model, gpu, weights, used)
    plan = again(settings)
    contexts = _contexts(args.contexts, plan)
    tolerance = positive_float(args.tolerance, "--tolerance") / 100
    error = plan.capacity().tokens / report.tokens - 1 if report is not None else None
    fix = suggest(plan, again) if gpu is not None and report is None else None
    if args.svg:
        _write(Path(args.svg), svg(plan))
    _print(args, plan, contexts, fix, report, error, tolerance)
    if error is not None:
        return 0 if abs(error) <= tolerance else 1
    return 1 if plan.problems else 0


def _subject(args: argparse.Namespace) -> tuple[Path | None, str, str]:
    """Profile file, model and card: the model is the profile's `model:`, the card stands in its file name."""
    if args.profile is None:
        if not args.model or not args.gpu:
            raise PlanError("say which model and which card: make plan MODEL=llama3-8b-awq GPU=rtx4090")
        return None, args.model, args.gpu
    path = profile_path(args.profile)
    profile = read_profile(path)
    cards = [*load_gpus(), "cpu"]
    gpu = args.gpu or next((part for part in path.stem.split(".")[1:] if part in cards), None)
    model = args.model or str(profile.get("model", "")).removesuffix("/current").rsplit("/", 1)[-1]
    if gpu is None or not model:
        raise PlanError(f"{path.name} names no known card (<model>.<card>.yaml) or no model: give --gpu and --model")
    return path, model, gpu


def _card(args: argparse.Namespace, name: str) -> Gpu:
    gpu = find_gpu(name, load_gpus())
    if args.total_gib:
        total = round(positive_float(args.total_gib, "--total-gib") * GIB)
        gpu = replace(gpu, engine_total_bytes=total, total_band=0.0)
    return gpu


def _report(url: str) -> Report:
    with httpx.Client(timeout=10) as client:
        return fetch_report(url, client)


def _settings(
    args: argparse.Namespace, path: Path | None, model: Model, gpu: Gpu | None, report: Report | None
) -> Settings:
    """Engine defaults, then the profile, then the command line, then what the running engine says of itself."""
    settings = default_settings(model, gpu)
    if path is not None:
        settings = apply_profile(settings, read_profile(path), model)
    given = {key: getattr(args, name) for name, key in _OPTIONS.items() if getattr(args, name) is not None}
    settings = apply_profile(settings, given, model)
    pool = args.kv_cache_gib or (os.environ.get("VLLM_CPU_KVCACHE_SPACE") if gpu is None else None)
    if pool:
        settings = replace(settings, kv_cache_bytes=round(positive_float(pool, "--kv-cache-gib") * GIB))
    if report is not None:  # the engine runs with them, so there is nothing to refuse
        return replace(
            settings,
            block_size=report.block_size,
            kv_cache_dtype=report.cache_dtype,
            max_model_len=report.max_model_len or settings.max_model_len,
            utilization=report.utilization or settings.utilization,
            kv_cache_bytes=report.kv_cache_bytes or settings.kv_cache_bytes,
        )
    return checked(settings, model, cpu=gpu is None)


def _planner(model: Model, gpu: Gpu | None, weights: Part, used: int) -> Callable[[Settings], Plan]:
    if gpu is None:
        return lambda settings: plan_cpu(model, settings, weights)
    return lambda settings: plan_gpu(model, gpu, settings, weights, used)


def _contexts(given: str | None, plan: Plan) -> list[int]:
    """The lengths asked for, or a usual few, up to the plan's max_model_len."""
    limit = plan.settings.max_model_len
    if given is None:
        return [*(length for length in (1024, 2048, 4096, 8192) if length < limit), limit]
    asked = sorted({positive_int(part, "--contexts") for part in given.split(",")})
    if asked[-1] > limit:
        raise PlanError(f"--contexts: a request of {asked[-1]} tokens is longer than max-model-len {limit}")
    return asked


def _print(
    args: argparse.Namespace,
    plan: Plan,
    contexts: list[int],
    fix: Plan | None,
    report: Report | None,
    error: float | None,
    tolerance: float,
) -> None:
    if args.json:
        found = as_json(plan, contexts)
        found["suggested"] = profile_text(fix).splitlines() if fix else None
        other = instead(plan, plan.gpu) if plan.gpu is not None and fix is None and plan.problems else None
        found["instead"] = [*other.profiles, *filter(None, [other.shape])] if other else None
        if report is not None and error is not None:
            found["verify"] = {"tokens": report.tokens, "blocks": report.blocks, "error_percent": round(error * 100, 3)}
        print(json.dumps(found, indent=2))
        return
    width = max(shutil.get_terminal_size().columns, NARROWEST) if sys.stdout.isatty() else ENDLESS
    print(text(plan, contexts, width))
    if report is not None and error is not None:
        print("\n" + verdict(plan, report, error, tolerance))
    elif plan.gpu is not None and not plan.problems and (shipped := _shipped(plan, plan.gpu)):
        print("\n" + "\n".join(fitted(f"  profiles that ship for it: {', '.join(shipped)}", width)))
    elif fix is not None:
        print("\n  a profile that fits:\n" + "\n".join("    " + line for line in profile_text(fix).splitlines()))
    elif plan.gpu is not None:
        line = f"  no setting makes {plan.model.name} fit; {instead(plan, plan.gpu).line(plan.gpu)}"
        print("\n" + "\n".join(fitted(line, width)))


def _shipped(plan: Plan, gpu: Gpu) -> list[str]:
    stem = f"{plan.model.name}.{gpu.key}"
    return sorted(path.stem for path in (*PROFILES.glob(f"{stem}.yaml"), *PROFILES.glob(f"{stem}.*.yaml")))


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make plan ... | head` ends quietly
    sys.exit(main())
