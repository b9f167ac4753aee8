"""What is wrong in a file of settings, in one line."""

from __future__ import annotations

from pydantic import ValidationError

_NAMES = {"missing": "is missing", "extra_forbidden": "is no setting"}  # about the key, whatever its value


def first_mistake(error: ValidationError) -> str:
    """`key: expectation, found value (and 2 more)`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    value = first.get("input")
    shown = "" if isinstance(value, dict) or first["type"] in _NAMES else f", found {value!r}"
    message = _NAMES.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    return f"{key + ': ' if key else ''}{message}{shown}{more}"
