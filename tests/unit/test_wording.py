"""What was expected, in plain words; and numbers with their nouns."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from gateway.settings import Settings
from gateway.wording import expectation, explain, meant, several


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    on: bool = True


class Example(BaseModel):
    """One field of each type that a settings file of this project holds."""

    whole: int = Field(1, gt=0, le=9)
    share: float = Field(0.5, ge=0, lt=1, allow_inf_nan=False)
    word: Literal["a", "b"] = "a"
    text: Annotated[str, Field(min_length=1)] = "x"
    few: tuple[int, ...] = Field((1,), min_length=1)
    pairs: dict[str, str] = {}
    inner: Inner = Inner()
    ends: AwareDatetime | None = None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"whole": "x"}, "expected a whole number"),
        ({"whole": 1.5}, "expected a whole number"),
        ({"whole": None}, "expected a whole number"),
        ({"whole": 0}, "expected more than 0"),
        ({"whole": 10}, "expected at most 9"),
        ({"share": "x"}, "expected a number"),
        ({"share": float("nan")}, "expected a finite number"),
        ({"share": -0.1}, "expected at least 0"),
        ({"share": 1}, "expected less than 1"),
        ({"word": "c"}, "expected 'a' or 'b'"),
        ({"text": 1}, "expected text"),
        ({"text": ""}, "expected at least 1 character"),
        ({"few": 1}, "expected a list"),
        ({"few": []}, "expected at least 1 item"),
        ({"pairs": []}, "expected keys and values"),
        ({"inner": 1}, "expected keys and values"),
        ({"inner": {"on": "maybe"}}, "expected true or false"),
        ({"inner": {"of": True}}, "is unknown"),
        ({"ends": "tomorrow"}, "expected a date and time, as in 2030-01-31T12:00:00Z"),
        ({"ends": "2030-01-31T12:00:00"}, "expected a time zone, as in 2030-01-31T12:00:00Z"),
    ],
)
def test_a_mistake_is_said_without_the_librarys_words(found: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Example.model_validate(found)
    (mistake,) = refused.value.errors()
    assert expectation(mistake) == says


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("batching.windw_ms", "batching.window_ms"),
        ("window_ms", "batching.window_ms"),
        ("timeout.stall_s", "timeouts.stall_s"),
        ("lisen", "listen"),
        ("batching.stream", None),
        ("nonsense", None),
    ],
)
def test_the_name_that_was_meant_is_near_in_its_own_section_or_the_same_in_another(name: str, near: str | None) -> None:
    known = ["listen", "batching", "timeouts"]
    for section in ("batching", "timeouts"):
        known += [f"{section}.{key}" for key in Settings.model_fields[section].annotation.model_fields]  # type: ignore[union-attr]
    assert meant(name, known) == (f": did you mean {near}?" if near else "")


def test_a_password_in_a_refused_address_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as refused:
        Example.model_validate({"whole": "http://user:canary@engine"})
    (line,) = explain(refused.value)
    assert line == "whole = 'http://…@engine': expected a whole number"


def test_a_number_and_its_noun() -> None:
    assert [several(n, "request") for n in (0, 1, 2, 2000)] == [
        "0 requests",
        "1 request",
        "2 requests",
        "2,000 requests",
    ]
    assert several(0.5, "request", "0.5") == "0.5 requests"
