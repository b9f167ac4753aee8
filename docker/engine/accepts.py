"""Whether this image's vLLM takes the profile and arguments that the environment names; nothing is loaded or started.

    python3 /opt/stack/engine/accepts.py

Exit codes: 0 its own parser takes them (one line says which version that was), 1 it does not (the last line says why).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from config import ConfigError, read_config

# Where the parser was in releases up to the newest; the first that is there counts.
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
PARSER_CLASSES = ("vllm.utils.argparse_utils", "vllm.utils")


def first(names: tuple[str, ...], attribute: str) -> Any:
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, attribute):
            return getattr(module, attribute)
    raise ConfigError(f"this vLLM has no {attribute} where any release had it")


def main() -> int:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        command = read_config(dict(os.environ)).command
        version = importlib.import_module("vllm").__version__
        made = first(PARSERS, "make_arg_parser")(first(PARSER_CLASSES, "FlexibleArgumentParser")(prog="vllm serve"))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"this image has no vLLM that can be loaded: {error}", file=sys.stderr)
        return 1
    if "--config" not in made._option_string_actions:  # older releases add it to the subcommand
        made.add_argument("--config", type=str, default="")
    try:
        made.parse_args(list(command[1:]))  # from "serve" on: without that word it does not read --config
    except SystemExit as ended:
        return 0 if not ended.code else 1
    print(f"vLLM {version} takes it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
