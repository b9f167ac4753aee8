"""`vllm bench serve`, imported once and run many times: its imports take longer than many a measurement.

Runs under the python that has vLLM, as a file, so it uses nothing of this project's. A line on standard input is one
run: JSON of `arguments`, `environment` (added to the process's) and `log`, a path for all that it says. Each runs in a
fork that is fresh but for the imports. The answer is a line with its exit code.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from typing import Any

COMMAND = ["vllm", "bench", "serve"]


def run(order: dict[str, Any]) -> int:
    """Exit code of one run; 128 and the signal's number where one ended it."""
    resident = os.getpid()
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code if code >= 0 else 128 - code
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() == resident:
            code = _within(order)
    finally:
        os._exit(code)


def _within(order: dict[str, Any]) -> int:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(order["environment"])
    sys.argv = [*COMMAND, *order["arguments"]]
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def main() -> None:
    from vllm.entrypoints.cli.main import main as command

    command()


def serve() -> None:
    """Until standard input ends. Its standard output carries the answers alone: what imports say goes to the other."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.argv = [*COMMAND, "--help"]  # imports all that the parser needs
    with contextlib.suppress(SystemExit):
        main()
    for line in sys.stdin:
        print(run(json.loads(line)), file=answers)


if __name__ == "__main__":
    serve()
