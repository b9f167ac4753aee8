"""Asks the pinned engine's own parser, configuration and KV-cache arithmetic. Runs under .venv-engine's Python.

One JSON request a line on stdin ({"ask": "parse" | "config" | "kv", ...}), one JSON answer a line on stdout.
"""

import contextlib
import io
import json
import sys

answers = sys.stdout
sys.stdout = sys.stderr  # the engine prints while it is imported

import torch  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.entrypoints.cli.serve import cmd_init  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    get_kv_cache_capacity,
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec  # noqa: E402

COMMANDS = cmd_init()


def command_parser():
    """The parser that the `vllm` command builds, with the one subcommand that is asked about."""
    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    for command in COMMANDS:
        command.subparser_init(subparsers)
    return parser


PARSER = command_parser()
DEFAULTS = vars(PARSER.parse_args(["serve"]))


def parse(request):
    """changed: options that differ from the engine's defaults, as it understood them."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = PARSER.parse_args(request["argv"])
            for command in COMMANDS:
                command.validate(args)
    except SystemExit as stop:
        return {"exit": stop.code, "error": errors.getvalue().strip().splitlines()[-1]}
    except ValueError as error:
        return {"exit": 1, "error": str(error)}
    changed = {
        name: value if isinstance(value, (int, float, str, list, type(None))) else str(value)
        for name, value in vars(args).items()
        if value != DEFAULTS.get(name) and name not in ("config", "dispatch_function")
    }
    return {"exit": 0, "changed": changed}


def engine_config(argv):
    args = PARSER.parse_args(argv)
    if args.model_tag:  # as the serve command does
        args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)


def config(request):
    """The engine's full configuration, which is where it checks one option against another and against the model."""
    try:
        made = engine_config(request["argv"])
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    return {
        "max_model_len": made.model_config.max_model_len,
        "max_num_seqs": made.scheduler_config.max_num_seqs,
        "in_flight_tokens": made.max_in_flight_tokens,
        "quantization": made.model_config.quantization,
        "block_size": made.cache_config.block_size,
        "utilization": made.cache_config.gpu_memory_utilization,
        "policy": made.scheduler_config.policy,
    }


def kv(request):
    """Blocks, tokens and concurrency of a pool, computed by the engine for the given layers."""
    made = engine_config(["serve", request["model"], "--skip-tokenizer-init"])
    made.model_config.max_model_len = request["max_model_len"]
    made.scheduler_config.max_num_batched_tokens = request["max_num_batched_tokens"]
    made.cache_config.kv_cache_layout = request["layout"]
    specs = {}
    for i, window in enumerate(request["windows"]):
        common = {
            "block_size": request["block_size"],
            "num_kv_heads": request["kv_heads"],
            "head_size": request["head_size"],
            "dtype": getattr(torch, request["dtype"]),
        }
        specs[f"layer.{i}"] = (
            FullAttentionSpec(**common) if window is None else SlidingWindowSpec(sliding_window=window, **common)
        )
    try:
        (found,) = get_kv_cache_configs(made, [specs], [request["pool_bytes"]])
    except ValueError as error:
        return {"error": str(error), "in_flight_tokens": made.max_in_flight_tokens}
    tokens, concurrency = get_kv_cache_capacity(made, found)
    return {
        "blocks": found.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "groups": len(found.kv_cache_groups),
        "in_flight_tokens": made.max_in_flight_tokens,
    }


ASKED = {"parse": parse, "config": config, "kv": kv}
for line in sys.stdin:
    question = json.loads(line)
    print(json.dumps(ASKED[question["ask"]](question)), file=answers, flush=True)
