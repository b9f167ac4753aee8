"""The machine check says yes or one line, and touches nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.engine_check import Machine, refusal

GOOD = Machine("Linux", "x86_64", (3, 11), (2, 36), frozenset({"sse2", "avx2"}), 50.0, installed=False)


def test_a_machine_with_everything_is_accepted() -> None:
    assert refusal(GOOD) is None


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"system": "Darwin", "arch": "arm64"}, ["Linux on x86_64", "Darwin on arm64"]),
        ({"arch": "aarch64"}, ["x86_64", "aarch64"]),
        ({"cpu_flags": frozenset({"sse2", "avx"})}, ["AVX2"]),
        ({"python": (3, 9)}, ["3.11", "3.9", "PYTHON="]),
        ({"python": (3, 15)}, ["3.14", "3.15"]),
        ({"glibc": (2, 17)}, ["2.28", "2.17"]),
        ({"glibc": (0, 0)}, ["glibc 2.28", "another C library"]),
        ({"free_gib": 1.25}, ["4 GiB", "1.2"]),
    ],
)
def test_each_missing_thing_is_one_line_that_names_what_was_found(change: dict[str, object], names: list[str]) -> None:
    line = refusal(replace(GOOD, **change))  # type: ignore[arg-type]
    assert line is not None
    assert "\n" not in line
    assert all(name in line for name in names)


def test_the_free_disk_no_longer_matters_once_installed() -> None:
    assert refusal(replace(GOOD, free_gib=0.1, installed=True)) is None
