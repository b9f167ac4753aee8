"""Beginnings in common, counted once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.prefixes import Prefixes, Prompts
from gateway.sharing import FROM_BYTES, Held, Parts, parts_of

TEXT = "".join(f"{number:07d} " for number in range(4096))  # no stretch of it repeats


def asked(text: str, group: str | None = None, model: str = "m") -> Prompts:
    return Prefixes().prompts({"model": model, "prompt": text}, group)


def parts(length: int, tail: str = "", tokens: int = 1000) -> Parts:
    """Of a prompt that has `length` bytes in common with the others."""
    return parts_of(asked(TEXT[:length] + tail), tokens)


@given(st.integers(0, 20_000), st.integers(1, 100_000))
def test_parts_sum_to_the_whole_prompt_or_there_are_none(length: int, tokens: int) -> None:
    found = parts(length, tokens=tokens)
    assert sum(size for _, size in found) == (tokens if length >= FROM_BYTES else 0)
    assert all(size >= 0 for _, size in found)


def test_what_two_prompts_have_in_common_is_found_to_within_an_eighth() -> None:
    held = Held()
    held.take(parts(8000, "a" * 2000))
    for shared in (1100, 2000, 5000, 8000):
        common = held.common(parts(shared, "b" * (10_000 - shared)))
        assert shared / 10 * 7 / 8 - 1 <= common <= shared / 10


def test_another_model_or_cache_salt_has_no_beginning_in_common() -> None:
    held = Held()
    held.take(parts(4000))
    assert held.common(parts(4000)) == 1000
    assert held.common(parts_of(asked(TEXT[:4000], model="other"), 1000)) == 0
    assert held.common(parts_of(asked(TEXT[:4000], group="other"), 1000)) == 0


def test_a_list_of_prompts_shares_nothing() -> None:
    assert parts_of(Prefixes().prompts({"prompt": [TEXT[:4000], TEXT[:4000]]}, None), 2000) == ()


def test_a_beginning_that_is_always_held_counts_by_its_newest_estimate() -> None:
    """Estimates are learned: under load the first one's would stand for as long as the load does."""
    held, last = Held(), parts(8000, tokens=3000)
    held.take(last)
    for tokens in (5000, 8000, 7900):
        newer = parts(8000, tokens=tokens)
        added = sum(size for _, size in newer) - held.common(newer)
        before = held.tokens
        held.take(newer)
        assert held.tokens - before == added
        held.give_back(last)
        last = newer
        assert held.tokens == tokens
    held.give_back(last)
    assert (held.tokens, len(held)) == (0, 0)


@given(st.data())
def test_whatever_comes_and_goes_each_part_in_flight_counts_once(data: st.DataObject) -> None:
    held, flying = Held(), list[Parts]()
    for _ in range(data.draw(st.integers(1, 30))):
        if flying and data.draw(st.booleans()):
            held.give_back(flying.pop(data.draw(st.integers(0, len(flying) - 1))))
        else:
            length = data.draw(st.sampled_from([1024, 3000, 9000]))
            one = parts(length, data.draw(st.sampled_from(["", "x" * 3000, "y" * 3000])), tokens=length)
            before = held.tokens
            common = held.common(one)
            held.take(one)
            flying.append(one)
            assert held.tokens - before == sum(size for _, size in one) - common
        keys = Counter(key for one in flying for key, _ in one)
        assert len(held) == len(keys)
    for one in flying:
        held.give_back(one)
    assert (held.tokens, len(held)) == (0, 0)
