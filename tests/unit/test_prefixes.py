"""What the prefix cache could make of a prompt, told from what came by before."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway import prefixes
from gateway.prefixes import Look, Prefixes, leading_texts, outcomes

A, A2, B = ("http://a:1", 0), ("http://a:1", 1), ("http://b:1", 0)
BLOCK = 16


def words(rng: random.Random, chars: int) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz     ") for _ in range(chars))


def ask(memory: Prefixes, prompt: str, cached: int | None = None, **given: Any) -> dict[str, int]:
    """Four characters are a token here, and always were."""
    prompts = memory.prompts({"prompt": prompt}, given.get("group"))
    looks = memory.look(prompts, given.get("epoch", A), given.get("now_s", 1.0))
    return outcomes(looks, prompts.more, len(prompt) // 4, cached, BLOCK)


@pytest.fixture
def text() -> str:
    return words(random.Random(1), 4096)


def test_a_prompt_under_one_block_is_short_whatever_it_says() -> None:
    memory = Prefixes()
    for _ in range(2):
        assert ask(memory, "x" * 64) == {"short": 16}  # 16 tokens: the last one is always computed
    assert ask(memory, "x" * 68) == {"tail": 1, "first_seen": 16}


def test_the_same_prompt_again_is_expected_in_whole_blocks_without_its_last_token(text: str) -> None:
    memory = Prefixes()
    assert ask(memory, text[:400]) == {"tail": 4, "first_seen": 96}
    assert ask(memory, text[:400], cached=96) == {"tail": 4, "hit": 96}
    assert ask(memory, text[:400], cached=0) == {"tail": 4, "evicted": 96}
    assert ask(memory, text[:400]) == {"tail": 4, "repeated": 96}


def test_what_the_engine_cached_counts_though_nobody_saw_it_come_by(text: str) -> None:
    assert ask(Prefixes(), text[:400], cached=32) == {"tail": 4, "hit": 32, "first_seen": 64}


def test_a_shared_beginning_is_told_to_within_its_last_block_and_step(text: str) -> None:
    memory, rng = Prefixes(), random.Random(2)
    ask(memory, text[:2000] + words(rng, 400))
    for shared in (200, 700, 1000, 1500, 2000):
        told = ask(memory, text[:shared] + words(rng, 2400 - shared), cached=0)
        step = 64 if shared <= 1024 else shared / 8
        assert shared / 4 - step / 4 - 2 * BLOCK <= told.get("evicted", 0) <= shared / 4
        assert sum(told.values()) == 600


def test_after_a_restart_what_was_read_before_it_is_restarted_and_what_was_read_since_is_not(text: str) -> None:
    memory = Prefixes()
    ask(memory, text[:400])
    assert ask(memory, text[:400], cached=0, epoch=A2) == {"tail": 4, "restarted": 96}
    assert ask(memory, text[:400], cached=96, epoch=A2) == {"tail": 4, "hit": 96}


def test_a_part_read_since_the_restart_and_a_part_before_it_are_told_apart(text: str) -> None:
    memory, rng = Prefixes(), random.Random(3)
    ask(memory, text[:2048])
    ask(memory, text[:1024] + words(rng, 1024), cached=0, epoch=A2)
    told = ask(memory, text[:2048], cached=0, epoch=A2)
    assert told == {"tail": 16, "evicted": 240, "restarted": 256}


def test_another_replica_does_not_have_it(text: str) -> None:
    memory = Prefixes()
    ask(memory, text[:400])
    assert ask(memory, text[:400], cached=0, epoch=B) == {"tail": 4, "elsewhere": 96}


def test_another_groups_salt_hides_it(text: str) -> None:
    memory = Prefixes()
    ask(memory, text[:400], group="one")
    assert ask(memory, text[:400], cached=0, group="two") == {"tail": 4, "salted": 96}
    assert ask(memory, text[:400], cached=96, group="two") == {"tail": 4, "hit": 96}
    assert ask(memory, text[:400], cached=0, group=None) == {"tail": 4, "salted": 96}


@pytest.mark.parametrize(("later_s", "outcome"), [(299, "evicted"), (1300, "first_seen")])
def test_what_came_by_long_ago_is_forgotten(text: str, later_s: float, outcome: str) -> None:
    memory = Prefixes(window_s=600)
    ask(memory, text[:400], now_s=1000)
    ask(memory, "something else entirely, in between", now_s=1000 + later_s / 2)
    assert ask(memory, text[:400], cached=0, now_s=1000 + later_s) == {"tail": 4, outcome: 96}


def test_the_memory_is_bounded_and_what_is_used_stays(text: str) -> None:
    memory, rng = Prefixes(entries=1000), random.Random(4)
    most = 0
    for _ in range(400):
        ask(memory, words(rng, 1000))
        assert "first_seen" not in ask(memory, text[:400]) or most == 0
        most = max(most, len(memory))
    assert 500 < most <= 1000 + 2 * 32  # a prompt is remembered whole, so a generation may go over by one


def test_no_text_is_kept(text: str) -> None:
    memory = Prefixes()
    ask(memory, text)
    assert {type(key) for key in memory._young} == {int}


def test_outcomes_sum_to_the_prompts_tokens_whatever_was_seen() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        total = rng.randint(0, 5000)
        here, before, other = sorted(rng.randint(0, total) for _ in range(3))
        look = Look(total, here, before, other, rng.choice(["restarted", "elsewhere"]))
        tokens = rng.randint(1, 2000)
        cached = rng.choice([None, 0, rng.randint(0, 2000)])
        told = outcomes(
            [look] * rng.choice([1, 1, 3]), rng.choice([0, 0, 5]), tokens, cached, rng.choice([16, 32, 128])
        )
        assert sum(told.values()) == tokens
        assert min(told.values()) > 0
        assert told.keys() <= set(prefixes.OUTCOMES)


def test_an_unknown_block_size_makes_everything_unknown(text: str) -> None:
    memory = Prefixes()
    looks = memory.look(memory.prompts({"prompt": text}, None), A, 1.0)
    assert outcomes(looks, 0, 100, 0, None) == {"unknown": 100}


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        (
            {"messages": [{"role": "user", "content": "hi"}]},
            {"messages": [{"role": "user", "content": "hi"}, {"role": "x"}]},
        ),
        ({"system": "be kind", "messages": [{"a": 1}]}, {"system": "be kind", "messages": [{"a": 1}, {"b": 2}]}),
        ({"instructions": "be kind", "input": "one"}, {"instructions": "be kind", "input": "one two"}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3, 4]}),
        ({"tools": [{"t": 1}], "messages": [{"a": 1}]}, {"messages": [{"a": 1}, {"b": 1}], "tools": [{"t": 1}]}),
    ],
)
def test_a_longer_conversation_begins_as_the_shorter_one(shorter: dict[str, Any], longer: dict[str, Any]) -> None:
    ((one,), _), ((two,), _) = leading_texts(shorter), leading_texts(longer)
    assert two.startswith(one)
    assert len(two) > len(one) > 0


def test_a_list_is_looked_at_prompt_by_prompt_up_to_a_limit() -> None:
    texts, more = leading_texts({"prompt": [f"prompt {i}" for i in range(20)]})
    assert texts[3] == b"prompt 3"
    assert (len(texts), more) == (prefixes.LISTED, 4)
