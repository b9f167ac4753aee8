"""Stands in for an environment's python with vLLM, where an engine's speed does not matter.

    PROGRAM -c "...print(version)"                                    says 0.32.0
    PROGRAM -m vllm.entrypoints.cli.main serve MODEL --port N ...     the scripted engine, told by its model's directory

A model's config.json may say `service_s` (seconds before an answer) and `slots` (answers at a time); --max-num-seqs is
the slots' number where it is given. With `branch` it has a process that outlives it, as vLLM's core does. A flag that
the engine never had ends it as it would there. There is no load generator in it, so nothing streamed is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

VERSION = "0.32.0"
KNOWN = {"--host", "--port", "--served-model-name", "--max-model-len", "--max-num-seqs", "--block-size"}
KNOWN |= {"--max-num-batched-tokens"}

BORN = time.time()


async def serve(model: Path, port: int, slots: int | None) -> None:
    said = json.loads((model / "config.json").read_text())
    if said.get("branch"):
        await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
    from tests.fakes.served import Served  # here: a look at the version needs none of it

    engine = Served(
        BORN, VERSION, kv_tokens=1_000_000, slots=slots or said.get("slots", 64), service_s=said.get("service_s", 0.0)
    )
    engine.port = port
    async with engine:
        print(f"(APIServer pid=1) INFO started on {engine.url}", flush=True)
        await asyncio.Event().wait()


def main(argv: list[str]) -> int:
    if argv[:1] == ["-c"]:
        print(VERSION)
        return 0
    if argv[:3] != ["-m", "vllm.entrypoints.cli.main", "serve"]:
        print(f"no {argv[0]} here", file=sys.stderr)
        return 2
    model, flags = Path(argv[3]), argv[4:]
    unknown = [flag for flag in flags if flag.startswith("--") and flag not in KNOWN]
    if unknown:
        print(f"vllm: error: unrecognized arguments: {' '.join(unknown)}", file=sys.stderr)
        return 2
    told = dict(zip(flags[::2], flags[1::2], strict=False))
    slots = told.get("--max-num-seqs")
    asyncio.run(serve(model, int(told["--port"]), int(slots) if slots else None))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
