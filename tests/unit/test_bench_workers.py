"""The plan and the report of the workers' benchmark; measuring takes the machine."""

from scripts.bench_workers import plan, report


def test_engine_and_load_get_the_last_core_and_workers_the_first_ones() -> None:
    cases, other = plan(2, [4, 5, 6, 7])
    assert [(case.workers, case.cores) for case in cases] == [(1, (4,)), (2, (4,)), (2, (4, 5))]
    assert other == 7


def test_workers_share_cores_where_there_are_fewer_and_the_name_says_so() -> None:
    cases, other = plan(3, [0, 1])
    assert cases[-1].cores == (0, 1, 0)
    assert cases[-1].name == "3 workers, 2 cores"
    assert other == 1


def test_the_report_has_medians_with_their_spread_and_says_where_the_last_row_is_no_scaling() -> None:
    rows = [{"requests_per_s": value} for value in (30.0, 10.0, 20.0)]
    result = {"in_flight": 64, "shared": True, "cases": {"one process, one core": rows}}
    lines = report(result).splitlines()
    assert lines[0] == "| 64 in flight | requests_per_s |"
    assert lines[2] == "| one process, one core | 20 (10 – 30) |"
    assert lines[3].endswith("the last row is no figure of scaling.")
    assert "scaling" not in report({**result, "shared": False})
