"""The memory plan: its arithmetic, its fit to measurements it was not fitted on, and what it calls a problem."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scripts.planner import PlanError, memory
from scripts.planner.catalog import SHAPES
from scripts.planner.gpus import Gpu, find_gpu, load_gpus
from scripts.planner.kv import Group, KvLayout
from scripts.planner.memory import Part, Plan, plan_cpu, plan_gpu
from scripts.planner.model import Model, parse_model
from scripts.planner.numbers import GIB, MIB
from scripts.planner.settings import Settings, apply_profile, checked, default_settings
from scripts.planner.suggest import suggest
from scripts.planner.weights import compute_weights

CALIBRATION = yaml.safe_load((Path(memory.__file__).parent / "calibration.yaml").read_text())
GPUS = load_gpus()


def model(name: str, **changes: Any) -> Model:
    return parse_model(json.loads((SHAPES / f"{name}.json").read_text()) | changes, name)


def plan(name: str, card: str, used: int = 0, **changes: Any) -> Plan:
    subject, gpu = model(name), GPUS[card]
    return plan_gpu(subject, gpu, replace(default_settings(subject, gpu), **changes), weights(subject), used)


def weights(subject: Model) -> Part:
    return Part("weights", compute_weights(subject).total, "computed", "")


def point_plan(point: dict[str, Any]) -> Plan:
    subject = model(point["shape"])
    gpu = GPUS[point["gpu"]] if "gpu" in point else replace(GPUS["l40s"], engine_total_bytes=_gib(point["total_gib"]))
    keys = ("utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype")
    settings = replace(default_settings(subject, gpu), **{key: point[key] for key in keys if key in point})
    return plan_gpu(subject, gpu, settings, weights(subject))


def _gib(number: float) -> int:
    return round(number * GIB)


# -- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", CALIBRATION["test"], ids=lambda point: point["name"])
def test_tokens_are_within_two_percent_of_engines_that_were_not_fitted(point: dict[str, Any]) -> None:
    assert point_plan(point).capacity().tokens == pytest.approx(point["tokens"], rel=0.02)


@pytest.mark.parametrize("point", CALIBRATION["test"], ids=lambda point: point["name"])
def test_the_stated_band_holds_the_measurement(point: dict[str, Any]) -> None:
    found = point_plan(point)
    assert found.capacity(found.pool_low).tokens < point["tokens"] < found.capacity(found.pool_high).tokens


def test_fit_and_test_points_are_disjoint() -> None:
    fitted = {(point["shape"], point.get("gpu"), point["tokens"]) for point in CALIBRATION["fit"]}
    assert not fitted & {(point["shape"], point.get("gpu"), point["tokens"]) for point in CALIBRATION["test"]}


def test_the_constants_are_those_the_fit_point_gives() -> None:
    """Everything the engine consumed beyond weights and known buffers; its graph reserve over its number of graphs."""
    (point,) = CALIBRATION["fit"]
    found = point_plan(point)
    known = compute_weights(found.model).total + memory.buffer_bytes(found.model, found.settings)
    assert _gib(point["consumed_gib"]) - known == pytest.approx(memory.OTHER_BYTES, abs=0.015 * GIB)
    graphs = memory.graph_count(found.settings)
    assert _gib(point["graphs_gib"]) / graphs == pytest.approx(memory.GRAPH_BYTES, rel=0.02)
    assert _gib(point["context_gib"]) == memory.CONTEXT_BYTES
    assert found.pool == pytest.approx(_gib(point["available_gib"]), abs=0.015 * GIB)


# -- the reference card -----------------------------------------------------------------------------------------------


def test_the_4090_with_awq_lands_in_the_reference_range() -> None:
    """The reference estimate is 14.8 to 15.5 GiB, 121 to 127 thousand tokens in fp16, 236 to 248 thousand in fp8."""
    assert 14.8 * GIB < plan("llama3-8b-awq", "rtx4090").pool < 15.5 * GIB
    assert 121_000 < plan("llama3-8b-awq", "rtx4090").capacity().tokens < 127_000
    assert 236_000 < plan("llama3-8b-awq", "rtx4090", kv_cache_dtype="fp8").capacity().tokens < 248_000


def test_a_plan_for_a_card_is_called_an_estimate_with_a_range() -> None:
    found = plan("llama3-8b-awq", "rtx4090")
    assert found.is_estimate
    assert found.pool_low < found.pool < found.pool_high
    assert {part.basis for part in found.parts} == {"computed", "estimate"}


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_parts_and_pool_add_up_to_the_share_of_the_card() -> None:
    found = plan("llama3-8b-awq", "rtx4090")
    assert sum(part.size for part in found.parts) + found.pool == found.requested
    assert found.requested == pytest.approx(0.92 * GPUS["rtx4090"].engine_total_bytes, abs=1)


def test_fp8_halves_a_token_and_quarters_nothing() -> None:
    half, full = plan("llama3-8b-awq", "h200", kv_cache_dtype="fp8"), plan("llama3-8b-awq", "h200")
    assert full.layout.block_bytes == 16 * 131072
    assert half.layout.block_bytes * 2 == full.layout.block_bytes
    assert half.capacity().tokens == pytest.approx(2 * full.capacity().tokens, rel=1e-3)


def test_fp8_on_ada_pays_for_flashinfers_workspace() -> None:
    graphs = {p.name: p.size for p in plan("llama3-8b-awq", "rtx4090").parts}["CUDA graphs"]
    fp8 = {p.name: p.size for p in plan("llama3-8b-awq", "rtx4090", kv_cache_dtype="fp8").parts}["CUDA graphs"]
    assert fp8 - graphs == 394 * MIB


def test_max_model_len_does_not_move_the_pool() -> None:
    """The guides' claim that halving it frees memory: the pool is sized by utilization."""
    assert plan("llama3-8b-awq", "rtx4090").pool == plan("llama3-8b-awq", "rtx4090", max_model_len=4096).pool


def test_capture_sizes_are_the_engines_default_list() -> None:
    """51 mixed graphs up to 512 tokens and 35 decode graphs up to 256 sequences, as an engine logged them."""
    assert memory.graph_count(plan("llama3-8b-awq", "rtx4090").settings) == 51 + 35
    assert memory.graph_count(plan("llama3-8b-awq", "rtx4090", enforce_eager=True).settings) == 0


def test_the_cpu_pool_is_exact_and_counts_whole_blocks() -> None:
    subject = model("smollm2-135m-instruct")
    settings = replace(default_settings(subject, None), kv_cache_bytes=GIB)
    found = plan_cpu(subject, settings, weights(subject))
    assert not found.is_estimate
    assert found.layout.block_bytes == 128 * 30 * 2 * 3 * 64 * 2
    assert found.capacity().blocks == GIB // found.layout.block_bytes == 364


def test_the_cpu_needs_a_pool_size() -> None:
    subject = model("smollm2-135m-instruct")
    with pytest.raises(PlanError, match="VLLM_CPU_KVCACHE_SPACE"):
        plan_cpu(subject, default_settings(subject, None), weights(subject))


def test_a_context_that_is_no_multiple_of_the_block_is_rounded_as_the_engine_does() -> None:
    """One request of 4,000 tokens takes 250 blocks of 16; the reported tokens are concurrency times 4,000."""
    found = plan("llama3-8b-awq", "h200", max_model_len=4001).capacity()
    assert found.concurrency == found.blocks / 251
    assert found.tokens == int(found.concurrency * 4001)


def test_one_block_is_kept_back() -> None:
    layout = plan("llama3-8b-awq", "rtx4090").layout
    assert layout.largest_length(513, 8192) == 8192
    assert layout.largest_length(512, 8192) == 8176
    assert layout.largest_length(1, 8192) == 0


@given(
    blocks=st.integers(0, 10_000),
    window=st.sampled_from([None, 64, 4096]),
    block_size=st.sampled_from([16, 64, 128]),
    limit=st.integers(1, 200_000),
)
def test_the_largest_length_is_the_largest(blocks: int, window: int | None, block_size: int, limit: int) -> None:
    layout = KvLayout((Group(None), Group(window)), 4, 1024, block_size, 2048)
    longest = layout.largest_length(blocks, limit)
    assert 0 <= longest <= limit
    assert longest == 0 or layout.request_blocks(longest) <= blocks - 1
    assert longest == limit or layout.request_blocks(longest + 1) > blocks - 1


@given(utilization=st.floats(0.3, 1.0), seqs=st.integers(1, 2048), tokens=st.integers(16, 16384))
def test_more_of_the_card_never_leaves_less_and_larger_batches_never_leave_more(
    utilization: float, seqs: int, tokens: int
) -> None:
    found = plan("llama3-8b-awq", "l4", utilization=utilization, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    more = plan(
        "llama3-8b-awq", "l4", utilization=utilization, max_num_seqs=seqs + 1, max_num_batched_tokens=tokens + 1
    )
    less = plan("llama3-8b-awq", "l4", utilization=utilization * 0.9, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert less.pool < found.pool
    # But for one CUDA graph: the engine's list of sizes can be one shorter for a larger maximum.
    assert more.pool < found.pool + memory.GRAPH_BYTES
    assert found.pool_low <= found.pool <= found.pool_high


def test_a_lone_request_is_bounded_by_the_memorys_bandwidth() -> None:
    """4.68 GB of AWQ weights and head at 1,008 GB/s."""
    assert plan("llama3-8b-awq", "rtx4090").decode_bound == pytest.approx(1008 / 4.677, rel=1e-3)


# -- problems ---------------------------------------------------------------------------------------------------------


def test_a_context_beyond_the_pool_is_a_problem_that_names_a_length_that_fits() -> None:
    """Field case D2: the shipped values fit with margin, max_model_len 131072 does not."""
    found = plan("llama3.1-8b-awq", "rtx4090")
    assert found.settings.max_model_len == 131072
    (problem,) = found.problems
    assert f"max-model-len: {found.largest_max_model_len // 16 * 16}" in problem
    assert 100_000 < found.largest_max_model_len < 131072


def test_a_context_beyond_the_model_is_refused() -> None:
    """Field case D2 for Llama 3 itself: its own limit is 8192."""
    subject = model("llama3-8b-awq")
    with pytest.raises(PlanError, match="write at most 8192"):
        checked(replace(default_settings(subject, GPUS["rtx4090"]), max_model_len=131072), subject)


def test_weights_larger_than_the_share_leave_no_pool() -> None:
    (problem,) = plan("llama3-8b", "rtx4080").problems
    assert "no room for a KV cache" in problem


def test_a_desktop_on_the_card_is_a_problem_that_names_a_utilization() -> None:
    """The start-up check is free memory against the share: the desktop breaks it, not the number."""
    assert plan("llama3-8b-awq", "rtx4090", utilization=0.95).problems == ()
    (problem,) = plan("llama3-8b-awq", "rtx4090", used=2 * GIB).problems
    assert "write at most 0.8" in problem


def test_sampling_beyond_the_profile_needs_room_outside_the_share() -> None:
    (problem,) = plan("llama3-8b-awq", "rtx3060", utilization=0.96).problems
    assert "top-p" in problem


def test_a_suggestion_fits_where_the_plan_did_not() -> None:
    first = plan("llama3.1-8b-awq", "rtx4090", used=2 * GIB)
    assert len(first.problems) == 2

    def again(settings: Settings) -> Plan:
        return plan_gpu(first.model, GPUS["rtx4090"], settings, weights(first.model), 2 * GIB)

    better = suggest(first, again)
    assert better is not None
    assert better.problems == ()
    assert better.settings.utilization < 0.92
    assert better.settings.max_model_len < 131072


def test_no_suggestion_where_nothing_fits() -> None:
    first = plan("llama3-8b", "rtx4080")
    assert suggest(first, lambda s: plan_gpu(first.model, GPUS["rtx4080"], s, weights(first.model))) is None


def test_bf16_is_refused_on_a_card_without_it() -> None:
    old = replace(GPUS["l4"], sm=75, name="NVIDIA T4")
    subject = model("llama3-8b")
    with pytest.raises(PlanError, match="no bfloat16"):
        plan_gpu(subject, old, default_settings(subject, old), weights(subject))


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("tensor-parallel-size", 2, "more than one card"),
        ("enable-lora", True, "adapter slots"),
        ("max-model-len", "8.1k5", "whole number"),
        ("max-num-seqs", -1, "above 0"),
        ("block-size", 0, "above 0"),
        ("gpu-memory-utilization", "nan", "finite"),
        ("gpu-memory-utilization", "inf", "finite"),
        ("gpu-memory-utilization", -0.5, "above 0"),
        ("gpu-memory-utilization", 1.5, "up to 1"),
        ("block-size", 24, "multiple of 16"),
        ("kv-cache-dtype", "int3", "not known"),
    ],
)
def test_values_that_make_no_sense_are_refused(option: str, value: object, reason: str) -> None:
    subject, gpu = model("llama3-8b-awq"), GPUS["rtx4090"]
    with pytest.raises(PlanError, match=reason):
        settings = checked(apply_profile(default_settings(subject, gpu), {option: value}, subject), subject)
        plan_gpu(subject, gpu, settings, weights(subject))


@pytest.mark.parametrize(
    ("written", "meant"), [("2k", 2000), ("2K", 2048), ("2048", 2048), (2048, 2048), ("auto", 8192)]
)
def test_suffixes_mean_what_vllm_means_by_them(written: object, meant: int) -> None:
    subject = model("llama3-8b-awq")
    profile = {"max-model-len": written}
    assert apply_profile(default_settings(subject, GPUS["rtx4090"]), profile, subject).max_model_len == meant


# -- cards ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["rtx4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090", "geforce rtx4090"])
def test_a_card_is_found_however_it_is_written(written: str) -> None:
    assert find_gpu(written, GPUS).key == "rtx4090"


@pytest.mark.parametrize(("written", "near"), [("rtx4900", "rtx4090"), ("h20", "h200"), ("a100-80", "a100")])
def test_an_unknown_card_lists_near_names(written: str, near: str) -> None:
    with pytest.raises(PlanError, match=rf"did you mean .*{near}"):
        find_gpu(written, GPUS)


def test_the_engine_sees_less_of_a_card_than_the_driver_prints() -> None:
    for gpu in GPUS.values():
        assert 0.1 * GIB < gpu.memory_mib * MIB - gpu.engine_total_bytes < 4 * GIB, gpu.key


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    table = tmp_path / "gpus.yaml"
    table.write_text("gpus: {x: {name: X}}")
    with pytest.raises(PlanError, match="cannot be read as a table of cards"):
        load_gpus(table)


def test_big_cards_get_the_engines_larger_defaults() -> None:
    subject = model("llama3-8b")

    def defaults(gpu: Gpu) -> tuple[int, int]:
        settings = default_settings(subject, gpu)
        return settings.max_num_seqs, settings.max_num_batched_tokens

    assert defaults(GPUS["h200"]) == (1024, 8192)
    assert defaults(GPUS["a100"]) == (256, 2048)
    assert defaults(GPUS["rtx4090"]) == (256, 2048)
