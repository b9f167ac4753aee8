"""The gateway's CPU benchmark: what it prints is measured, and grows with what is measured."""

import re

import pytest

from scripts import bench_cpu


def test_every_figure_is_printed_and_a_longer_prompt_costs_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_cpu.main(["--runs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"one completion (\d+) µs, one event of a stream ([\d.]+) µs", lines[0])
    assert found and 1 < float(found[2]) < float(found[1])
    for line in lines[1:3]:  # remembering a prompt; counting its beginning once
        told = {chars: float(us) for chars, us in re.findall(r"([\d,]+) characters (-?[\d.]+) µs", line)}
        assert list(told) == ["160", "2,000", "8,000", "32,000"]
        assert told["160"] < told["2,000"] < told["32,000"]
    assert re.search(r"choosing its replica takes: ([\d.]+ µs among \d+(, )?){3}$", lines[3])
