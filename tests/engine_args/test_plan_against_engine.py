"""The planner's KV arithmetic against the pinned engine's own functions."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.planner.catalog import SHAPES
from scripts.planner.kv import capacity, kv_layout
from scripts.planner.model import Model, parse_model
from scripts.planner.numbers import GIB
from tests.engine_args.engine import PYTHON, ROOT, cpu_probe

PATTERNS: dict[str, tuple[int | None, ...]] = {
    "all full": (None,) * 32,
    "all sliding": (512,) * 32,
    "alternating": (512, None) * 16,
    "five to one": (512, 512, 512, 512, 512, None) * 5,
    "one more of a kind": (512, None) * 12 + (None,),
    "uneven": (512,) * 7 + (None,) * 3,
}


@pytest.fixture(scope="module")
def shape_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shape")
    found = json.loads((SHAPES / "llama3-8b.json").read_text())
    (directory / "config.json").write_text(json.dumps(found | {"model_type": "llama", "rms_norm_eps": 1e-5}))
    return directory


def shaped(windows: tuple[int | None, ...]) -> Model:
    base = parse_model(json.loads((SHAPES / "llama3-8b.json").read_text()), "llama3-8b")
    return dataclasses.replace(base, windows=windows, layers=len(windows))


@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize(("block_size", "max_model_len"), [(16, 8192), (32, 4001), (128, 777)])
@pytest.mark.parametrize("pool_bytes", [2 * GIB, 3 * GIB + 12_345])
def test_blocks_tokens_and_concurrency_are_the_engines(
    pattern: str, block_size: int, max_model_len: int, pool_bytes: int, shape_dir: Path
) -> None:
    model = shaped(PATTERNS[pattern])
    answer = ask_kv(shape_dir, model, block_size, max_model_len, pool_bytes)
    layout = kv_layout(model, "auto", block_size, answer["in_flight_tokens"])
    found = capacity(layout, pool_bytes, max_model_len)
    assert (found.blocks, found.tokens) == (answer["blocks"], answer["tokens"])
    assert found.concurrency == pytest.approx(answer["concurrency"])
    assert len(layout.groups) == answer["groups"]


@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("spare_blocks", [-1, 0, 1])
def test_a_request_fits_exactly_when_the_engine_says_so(pattern: str, spare_blocks: int, shape_dir: Path) -> None:
    """At one block too few the engine refuses to start: one block of the pool is kept back."""
    model = shaped(PATTERNS[pattern])
    layout = kv_layout(model, "auto", 16, 2048)
    blocks = layout.request_blocks(8192) + 1 + spare_blocks
    answer = ask_kv(shape_dir, model, 16, 8192, blocks * layout.block_bytes)
    assert answer["in_flight_tokens"] == layout.in_flight_tokens
    assert (layout.largest_length(blocks, 8192) == 8192) == ("error" not in answer)


def ask_kv(directory: Path, model: Model, block_size: int, max_model_len: int, pool_bytes: int) -> dict[str, Any]:
    return cpu_probe().ask(
        ask="kv",
        model=str(directory),
        layout="LBHNC",
        windows=model.windows,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=2048,
        kv_heads=model.kv_heads,
        head_size=model.head_dim,
        dtype=model.dtype,
        pool_bytes=pool_bytes,
    )


def test_the_planner_runs_in_the_engines_own_environment() -> None:
    """So that --verify can be taken to any machine where a vLLM runs, with this repository and nothing installed."""
    argv = [str(PYTHON), "-m", "scripts.plan", "--model", "llama3-8b-awq", "--gpu", "rtx4090", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(done.stdout)["fits"] is True
