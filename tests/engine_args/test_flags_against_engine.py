"""What make flags says about the pinned release, put to its own parser."""

import functools
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.engine_args import load
from scripts.flags.settings import filled_settings
from scripts.flags.truth import Truth
from tests.engine_args.engine import Probe
from tests.unit.flags_answers import findings, parts, profile
from tests.unit.test_flags_facts import GUIDE_COMMANDS
from tests.unit.test_flags_public import LINES

COMMANDS = [*GUIDE_COMMANDS, *(line["command"] for line in LINES)]
SOUND = {"real", "harmless", "harmful", "unverifiable"}
# The parser takes these and the engine stops at them later.
LATER = {"--attention-backend flash-attn", "--compilation-config"}


@functools.cache
def probe() -> Probe:
    return Probe("flags_probe.py")


def parse(*argv: str) -> dict[str, Any]:
    return probe().ask(argv=argv)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_the_parser_takes_what_is_called_real_and_refuses_the_rest(command: str) -> None:
    """Flag by flag, as it was typed: existence is never a matter of opinion."""
    typed = {str(given): given for start in parts(command).starts for given in start.given}
    for finding in findings(command):
        given = typed.get(finding.subject.en)
        if finding.kind != "flag" or given is None or str(given) in LATER or given.name == "--model":
            continue
        words = [f"{given.name}={given.values[0]}"] if given.joined else [given.name, *given.values]
        answer = parse("m", *words)
        assert (answer["exit"] == 0) == (finding.verdict in SOUND), (finding, answer)


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_every_profile_parses_and_its_values_arrive(command: str, tmp_path: Path) -> None:
    found = profile(command)
    path = tmp_path / "profile.yaml"
    path.write_text(found.yaml("0.32.0", "a test"))
    answer = parse(*([] if found.model else ["m"]), "--config", str(path))
    assert answer["exit"] == 0, answer
    for key, value in found.settings.items():
        if key == "model":
            assert answer["values"]["model"] == value
        elif key.startswith("no-"):
            assert answer["values"][key.removeprefix("no-").replace("-", "_")] is False
        elif not isinstance(value, dict):  # those arrive as objects of the engine
            arrived = answer["values"][key.replace("-", "_")]
            assert arrived in (value, [value], str(value)), key


def test_the_profile_of_the_first_guide_is_what_a_user_gets() -> None:
    """The whole way from the guide's line to a config file, value by value; its block size has no figure behind it."""
    found = profile(next(iter(GUIDE_COMMANDS)))
    assert found.unproven == ("--block-size 32",)
    assert found.settings == {
        "model": "./llama3-8b-awq",
        "dtype": "half",
        "max-model-len": 8192,
        "gpu-memory-utilization": 0.92,
    }


ADVICE = [entry for entry in Truth.load().entries if entry.becomes and entry.holds("0.32.0")]


@pytest.mark.parametrize("entry", ADVICE, ids=[entry.id for entry in ADVICE])
def test_what_the_table_puts_into_a_profile_parses(entry: Any, tmp_path: Path) -> None:
    texts = {"guided-decoding-backend": "xgrammar", "override-pooler-config": "{}", "log-config-file": "x.json"}
    value = entry.example or texts.get(entry.id, "3")
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(filled_settings(entry.becomes, value)))
    answer = parse("m", "--config", str(path))
    assert answer["exit"] == 0, (entry.becomes, answer)


REFUSED = [
    "--enable-paged-attn",
    "--disable-cuda-graph",
    "--swap-space 4",
    "--disable-log-requests",
    "--log-level debug",
    "--enable-prefix-caching=false",
    "--enable-chunked-prefill False",
    "--limit-mm-per-prompt image=2",
    "--compilation-config 3",
    "--kv-cache-dtype int3",
    "--max-model-len 8.5K",
    "--block-size sixteen",
    "--guided-decoding-backend outlines",
    "--task embed",
]
TAKEN = ["--log-level DEBUG", "--max-model 4096", "--no-enable-prefix-caching", "-tp 2", "--max-model-len 8.5k", "-O3"]


@pytest.mark.parametrize("words", REFUSED + TAKEN)
def test_single_flags_are_judged_as_the_parser_judges_them(words: str) -> None:
    answer = parse("m", *shlex.split(words))
    (finding,) = [f for f in findings(f"vllm serve m {words}") if f.kind == "flag"]
    assert (answer["exit"] != 0) == (words in REFUSED)
    assert (finding.verdict not in SOUND) == (words in REFUSED), finding


def test_every_flag_s_form_is_right() -> None:
    """For all 316: a switch takes nothing after it, and what needs a value is refused without."""
    for flag in load().flags:
        if flag.name in ("--config", "--model"):  # taken out of the line before argparse sees it
            continue
        answer = parse("m", flag.name)
        refused = "expected" in answer.get("error", "")
        assert refused == (flag.form in ("value", "list")), (flag, answer)
