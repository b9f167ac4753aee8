"""The command line of `make tune`, and the sizes that it takes where nothing else is said."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from scripts._command import Parser
from scripts.bench.engine import ROOT
from scripts.tune.checks import platform_of

GATEWAY = ROOT / "configs" / "gateway.yaml"

# So that the whole keeps its time: 15 minutes on a CPU with the small model, an hour on a GPU. Two shared cores give
# the small model some 100 tokens/s, so answers are cut to the tokens below there; prompts keep their lengths.
SIZES: dict[str, dict[str, int | float | None]] = {
    "cpu": {"budget_s": 780, "most_in_flight": 32, "waves": 2, "answer_tokens": 48, "soak_s": 45},
    "gpu": {"budget_s": 3300, "most_in_flight": 512, "waves": 4, "answer_tokens": None, "soak_s": 120},
}


def parse(argv: list[str] | None, doc: str) -> argparse.Namespace:
    """Arguments with the platform's sizes filled in. Ends the process with code 2 for wrong usage."""
    promised = yaml.safe_load((ROOT / "configs/slo.yaml").read_text())
    parser = Parser("tune", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="a file of configs/engine, without .yaml, or a path")
    parser.add_argument("--model", help="the model's directory on this machine (default: found by the profile's name)")
    parser.add_argument("--workload", choices=["chat", "prefix", "long", "mixed"], default="chat")
    parser.add_argument("--ttft-s", type=float, default=promised["ttft"]["limit_s"], help="default: configs/slo.yaml's")
    parser.add_argument("--itl-s", type=float, default=promised["itl"]["limit_s"], help="default: configs/slo.yaml's")
    parser.add_argument("--budget-s", type=float, help="for all of it; 780 on a CPU, 3300 on a GPU")
    parser.add_argument("--trials", type=int, default=12, help="at most, within the budget")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gain", type=float, default=1.03, help="what a profile must serve more to be worth a change")
    parser.add_argument("--soak-s", type=float, help="45 on a CPU, 120 on a GPU")
    parser.add_argument("--most-in-flight", type=int, help="32 on a CPU, 512 on a GPU")
    parser.add_argument("--waves", type=int, help="requests of a measurement, as multiples of those in flight: 2, 4")
    parser.add_argument("--answer-tokens", type=int, help="length of every answer; 48 on a CPU, real chats' on a GPU")
    parser.add_argument("--platform", choices=["gpu", "cpu"], help="default: the profile's, by its file's name")
    parser.add_argument("--kv-fp8", action="store_true", help="also try a KV cache in 8 bits, which rounds")
    parser.add_argument("--gateway-settings", type=Path, default=GATEWAY)
    parser.add_argument("--python", default=str(ROOT / ".venv-engine/bin/python"), help="of the environment with vLLM")
    parser.add_argument("--image", help="start engines in Docker from this image, with all GPUs")
    parser.add_argument("--out", type=Path, help="the results' folder (default: results/tune/PROFILE)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="report only")
    parser.add_argument("--revert", action="store_true", help="put back what the last run replaced")
    parser.add_argument("--dry-run", action="store_true", help="check profile, model, engine, card; say what is tried")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if not arguments.profile:
        parser.exit(2, "tune: say which profile: make tune PROFILE=llama3-8b-awq.rtx4090 (a file of configs/engine)\n")
    arguments.stated = arguments.platform is not None
    arguments.platform = arguments.platform or platform_of(Path(arguments.profile).name)
    for name, value in SIZES[arguments.platform].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments
