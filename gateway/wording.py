"""What a file or variable was expected to hold, in plain words: pydantic's own speak of tuples and instances."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

_WORDS = {
    "string_type": "expected text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_parsing_size": "expected a smaller number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "dict_type": "expected keys and values",
    "model_type": "expected keys and values",
    "model_attributes_type": "expected keys and values",
    "path_type": "expected a path",
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "timezone_aware": "expected a time zone, as in 2030-01-31T12:00:00Z",
    **dict.fromkeys(
        ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "datetime_object_invalid"),
        "expected a date and time, as in 2030-01-31T12:00:00Z",
    ),
}
_UNIT = {"too_short": "item", "string_too_short": "character"}
_USERINFO = re.compile(r"://[^/@\s]*@")  # a password in a URL must not end up in a log


def several(number: float, noun: str, shown: str = "") -> str:
    """`1 request`, `2,000 requests`; `shown` where the number is to be written otherwise."""
    return f"{shown or format(number, ',')} {noun}{'' if number == 1 else 's'}"


def expectation(item: Mapping[str, Any]) -> str:
    """What one of ValidationError.errors() says; our own validators' words are kept as they are."""
    context = {key: _round(value) for key, value in item.get("ctx", {}).items()}
    if item["type"] in ("too_short", "string_too_short"):
        return f"expected at least {several(context['min_length'], _UNIT[item['type']])}"
    words = _WORDS.get(item["type"])
    return words.format(**context) if words else str(item["msg"]).removeprefix("Value error, ")


def _round(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def meant(name: str, known: Iterable[str], between: str = ".") -> str:
    """`: did you mean X?` where a known name is near, else nothing. `between` parts a name into sections.

    A name in a known section is looked for there alone: what they share would make any of them near.
    """
    section, _, last = name.rpartition(between)
    parts = {each: each.rpartition(between) for each in sorted(known)}
    there = {leaf: each for each, (front, _, leaf) in parts.items() if front == section}
    elsewhere = [each for each, (_, _, leaf) in parts.items() if leaf == last]
    if near := difflib.get_close_matches(last, there, n=1, cutoff=0.7):
        return f": did you mean {there[near[0]]}?"
    near = elsewhere or ([] if there else difflib.get_close_matches(name, parts, n=1, cutoff=0.85))
    return f": did you mean {near[0]}?" if near else ""


def explain(error: ValidationError, known: Iterable[str] = ()) -> list[str]:
    """A line a mistake: key, value, expectation. `known` are the keys that an unknown one may have been meant for."""
    lines = []
    items = [(".".join(str(part) for part in item["loc"]), item) for item in error.errors(include_url=False)]
    for key, item in items:
        if key and any(other.startswith(f"{key}.") for other, _ in items):
            continue  # a list without its bad entries may be too short as well: only the entries are the mistake
        if not key:
            lines.append(expectation(item))
        elif item["type"] == "extra_forbidden":
            lines.append(unknown(key, known))
        else:
            lines.append(f"{key} = {_USERINFO.sub('://…@', repr(item['input']))}: {expectation(item)}")
    return lines


def unknown(key: str, known: Iterable[str], between: str = ".") -> str:
    """The line about a name that is no setting."""
    return f"{key} is not a setting{meant(key, known, between) or ' (docs/settings.md lists them)'}"
