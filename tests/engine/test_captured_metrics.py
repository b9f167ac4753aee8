"""The captured metric names against what a running engine of the pinned release exports."""

import re

from scripts.engine_args import load
from scripts.flags.truth import Truth
from tests.engine.conftest import Stack


def test_every_series_of_a_running_engine_is_captured(stack: Stack) -> None:
    """And none that the reviewed table calls invented, renamed or removed is exported."""
    stack.engine.post("/v1/completions", json={"model": stack.model, "prompt": "One two", "max_tokens": 2})
    page = stack.engine.get("/metrics").text
    exported = {name for name in re.findall(r"^(vllm:\w+)", page, re.MULTILINE) if not name.endswith("_created")}
    assert len(exported) > 30
    assert sorted(name for name in exported if not load().has_metric(name)) == []
    gone = {name for entry in Truth.load().entries if entry.verdict != "real" for name in entry.metrics}
    assert exported & gone == set()
