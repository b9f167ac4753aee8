"""The reviewed table against the captured releases, and against itself."""

import re

import pytest
from pydantic import ValidationError

from scripts.engine_args import PINNED, History, load
from scripts.flags.finding import SECRET
from scripts.flags.nearest import distance, nearest
from scripts.flags.table import main as table
from scripts.flags.truth import Entry, Truth

TRUTH = Truth.load()
HISTORY = History.load()
ENGINE = load()
ENTRIES = pytest.mark.parametrize("entry", TRUTH.entries, ids=[entry.id for entry in TRUTH.entries])
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@ENTRIES
def test_a_verdict_about_existence_is_what_the_releases_say(entry: Entry) -> None:
    """Nothing is called invented that some release had, nor real that the pinned one lacks."""
    life = {"flags": HISTORY.flag_life, "env": HISTORY.env_life, "metrics": HISTORY.metric_life}
    lives = [(name, life[kind](name)) for kind in life for name in getattr(entry, kind)]
    lives += [(name, HISTORY.program_life(name)) for name in entry.programs if name.startswith("vllm")]
    for name, lived in lives:
        there = lived is not None and lived.gone_in is None
        if entry.verdict == "never existed":
            assert lived is None, name
        elif entry.verdict == "removed":
            assert lived is not None and not there, name
        elif entry.holds(PINNED) and entry.verdict != "renamed" and (not entry.env or name in ENGINE.env):
            assert there, name


@ENTRIES
def test_what_is_advised_exists(entry: Entry) -> None:
    """Flags named in what to write, and keys of what goes into the profile, are flags of the pinned release."""
    if not entry.holds(PINNED):
        return
    advised = FLAG.findall(entry.write.replace("--shm-size", "")) + [f"--{key}" for key in entry.becomes]
    assert [flag for flag in advised if ENGINE.flag(flag) is None] == []
    written = re.findall(r"vllm:\w+", entry.write)
    assert [name for name in written if not ENGINE.has_metric(name)] == []
    assert [name for name in entry.environment if name.startswith("VLLM_") and name not in ENGINE.env] == []


@ENTRIES
def test_each_entry_says_the_same_in_both_languages(entry: Entry) -> None:
    """As far as a program can tell: Chinese is Chinese, English isn't, and both name the same flags and figures."""
    assert re.search(r"[\u4e00-\u9fff]", entry.why_zh)
    assert not re.search(r"[\u4e00-\u9fff]", entry.why + entry.write + entry.effect + entry.claim)
    for english, chinese in ((entry.why, entry.why_zh), (entry.write, entry.write_zh), (entry.effect, entry.effect_zh)):
        assert set(FLAG.findall(english)) == set(FLAG.findall(chinese))
        numbers = [set(re.findall(r"\d[\d.,]*\d", text)) for text in (english, chinese)]
        assert numbers[0] == numbers[1]


def test_every_flag_that_is_gone_was_reviewed() -> None:
    """So that nobody with an old command line is told only that a flag is gone, and not what took its place."""
    ever = {flag.name for version in HISTORY.versions for flag in HISTORY.engine(version).flags}
    gone = {name for name in ever if (life := HISTORY.flag_life(name)) and life.gone_in}
    gone = {name.replace("_", "-") for name in gone}
    assert gone - TRUTH.names("flags") == set()


def test_conditions_stand_before_the_general_entry() -> None:
    """The first match wins, so an entry behind one that takes every value would never be reached."""
    for kind in ("flags", "docker", "env"):
        for name in TRUTH.names(kind):
            seen_general = False
            for entry in TRUTH.about_any(kind, name, PINNED):
                assert not seen_general, f"{entry.id} is out of reach"
                seen_general = entry.when is None and entry.above is None and entry.below is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flags": []}, "about none or several"),
        ({"env": ["X"]}, "about none or several"),
        ({"write": "x"}, "only one of write and write_zh"),
        ({"evidence": "measured"}, "names no hardware"),
        ({"when": "a", "example": "b"}, "example that it does not match"),
        ({"verdict": "fine"}, "Input should be"),
        ({"typo": 1}, "Extra inputs"),
    ],
)
def test_a_badly_written_entry_is_refused(change: dict[str, object], message: str) -> None:
    good = {"id": "x", "flags": ["--x"], "verdict": "real", "why": "y", "why_zh": "因", "evidence": "run"}
    Entry(**good)
    with pytest.raises(ValidationError, match=message):
        Entry(**{**good, **change})


def test_the_documents_are_what_the_table_says() -> None:
    """Stale after a change of the table or an upgrade: run `make flags-docs`."""
    assert table(["--check"]) == 0


def test_near_names_are_told_from_far_ones() -> None:
    known = [flag.name for flag in ENGINE.flags]
    assert nearest("--tensor-paralel-size", known) == "--tensor-parallel-size"
    assert nearest("--max-modle-len", known) == "--max-model-len"
    assert nearest("--make-it-fast", known) is None
    assert distance("ab", "ba") == 1 and distance("", "abc") == 3


def test_secrets_are_told_from_counts_of_tokens() -> None:
    secret = ["VLLM_API_KEY", "HF_TOKEN", "--api-key", "--hf-token", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"]
    plain = ["--num-speculative-tokens", "--max-num-batched-tokens", "--tokenizer", "VLLM_KEYWORDS"]
    assert [name for name in secret + plain if SECRET.search(name)] == secret
