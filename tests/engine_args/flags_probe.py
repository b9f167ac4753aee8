"""Asks the pinned engine's `vllm serve` parser alone. Runs under .venv-engine's Python.

One JSON list of words a line on stdin, one JSON answer a line on stdout: exit (0: taken), error (its last line), and
values (every option as the parser understood it).
"""

import contextlib
import io
import json
import sys

answers = sys.stdout
sys.stdout = sys.stderr  # the engine prints while it is imported

from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

parser = FlexibleArgumentParser(prog="vllm")
make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))

for line in sys.stdin:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            answer = {"exit": 0, "values": vars(parser.parse_args(["serve", *json.loads(line)["argv"]]))}
    except SystemExit as stop:
        answer = {"exit": stop.code, "error": errors.getvalue().strip().splitlines()[-1]}
    except Exception as error:  # what the parser raises ends the start like an exit does
        answer = {"exit": 1, "error": str(error)}
    print(json.dumps(answer, default=str), file=answers, flush=True)
