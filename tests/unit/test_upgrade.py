"""`make upgrade` before Docker is asked: what it records, what it asks an engine for, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import _dotenv, upgrade
from scripts._smoke import metric_names, missing_metrics, needed_metrics
from scripts.engine_args.vocabulary import PINNED
from scripts.engine_args.vocabulary import load as load_release


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("A=1\nIMAGE=x\nB=2\n", "A=1\nIMAGE=y\nB=2\n"),
        ("IMAGE=w\nIMAGE=x", "IMAGE=w\nIMAGE=y\n"),  # the last one counts
        ("# what it is\n# IMAGE=x\nB=2\n", "# what it is\n# IMAGE=x\nIMAGE=y\nB=2\n"),
        ("B=2\n", "B=2\nIMAGE=y\n"),
        ("OTHER_IMAGE=x\n", "OTHER_IMAGE=x\nIMAGE=y\n"),
    ],
)
def test_a_setting_is_changed_where_it_stands(before: str, after: str) -> None:
    assert _dotenv.with_value(before, "IMAGE", "y") == after


def test_the_file_keeps_its_mode_and_no_half_of_it_stays(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("A=1\n", encoding="utf-8")
    path.chmod(0o600)
    _dotenv.record(path, "IMAGE", "y")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [".env"]


def test_the_needed_series_are_those_that_somebody_reads_and_the_pinned_engine_has(tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway/engine_metrics.py").write_text('"vllm:num_requests_running"', encoding="utf-8")
    (tmp_path / "configs/prometheus/rules").mkdir(parents=True)
    rule = "expr: vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc"
    (tmp_path / "configs/prometheus/rules/a.yml").write_text(rule, encoding="utf-8")
    assert needed_metrics(tmp_path) == {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


def test_the_projects_own_needs_are_not_empty_and_the_pinned_engine_meets_them() -> None:
    pinned = load_release(PINNED)
    assert len(needed_metrics()) >= 5
    assert all(pinned.has_metric(name) for name in needed_metrics())


class Page:
    def __init__(self, status: int, text: str) -> None:
        self.answer = status, text

    def ask(self, *_: object) -> tuple[int, str]:
        return self.answer


PAGE = '# TYPE vllm:a gauge\nvllm:a{engine="0"} 1.0\n# TYPE vllm:b_seconds histogram\n# TYPE vllm:c_total counter\n'


def test_a_family_without_a_sample_counts_as_there() -> None:
    assert {"vllm:a", "vllm:b_seconds", "vllm:c_total"} <= metric_names(PAGE)
    needed = frozenset({"vllm:a", "vllm:b_seconds_bucket", "vllm:c_total"})
    assert missing_metrics(Page(200, PAGE), needed) is None  # type: ignore[arg-type]


def test_a_series_that_is_gone_is_named() -> None:
    told = missing_metrics(Page(200, PAGE), frozenset({"vllm:a", "vllm:gone"}))  # type: ignore[arg-type]
    assert told == "its /metrics lacks what rules, dashboards or gateway read: vllm:gone"
    assert missing_metrics(Page(503, ""), frozenset()) == "its /metrics answered 503"  # type: ignore[arg-type]


def test_a_name_that_is_no_image_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["$(whoami)"], ["--privileged:1"], []):
        with pytest.raises(SystemExit) as ended:
            upgrade.main(arguments)
        assert ended.value.code == 2
    assert "name the engine's new image: make upgrade ENGINE_IMAGE=" in capsys.readouterr().err
