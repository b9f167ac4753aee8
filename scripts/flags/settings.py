"""A flag's or an entry's part in a profile."""

from typing import Any

import yaml

from scripts.engine_args import Flag


def setting(flag: Flag, value: Any) -> dict[str, Any]:
    """The profile's line for a flag: a false boolean is written as its negative form, for `x: false` is dropped."""
    key = flag.name.removeprefix("--")
    if value is False and flag.negative:
        return {flag.negative.removeprefix("--"): True}
    return {} if value is False else {key: value}


def fill(text: str, value: str | None) -> str:
    """A text of the table with the given value in its place."""
    return text.replace("{value}", value or "…").replace("{VALUE}", (value or "…").upper())


def filled_settings(becomes: dict[str, Any], value: str | None) -> dict[str, Any]:
    """The table's settings with the given value in them; dotted keys nest."""
    found: dict[str, Any] = {}
    for key, template in becomes.items():
        filled = template
        if isinstance(template, str) and "{value}" in template:
            if value is None:
                continue
            filled = _typed(template.replace("{value}", value))
        first, *rest = key.split(".")
        for part in reversed(rest):
            filled = {part: filled}
        found[first] = {**found[first], **filled} if first in found and rest else filled
    return found


def _typed(text: str) -> Any:
    """A number, truth or JSON value as such; everything else stays text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
