"""The captured data against the installed engine's own parser."""

from scripts.engine_args import load
from scripts.engine_args.__main__ import ENGINE_PYTHON, ask


def test_the_capture_is_what_the_installed_parser_says() -> None:
    """Stale after an upgrade: run `make engine-args`."""
    assert ask(ENGINE_PYTHON).dumps() == load().dumps()
