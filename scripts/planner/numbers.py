"""Numbers as people and vLLM's config files write them."""

import math
import re

from scripts.planner import PlanError

MIB = 1 << 20
GIB = 1 << 30

_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_SCALE = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def human_int(value: object, what: str) -> int:
    """A whole number, or one with vLLM's suffixes: 8k is 8000, 8K is 8192."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise PlanError(f"{what}: expected a whole number, found {value!r}")
    if isinstance(value, int):
        return value
    text = value.strip()
    if match := _HUMAN.fullmatch(text):
        exact = float(match[1]) * _SCALE[match[2]]
        if exact != int(exact):
            raise PlanError(f"{what}: {value!r} is not a whole number")
        return int(exact)
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"{what}: expected a whole number, found {value!r}") from None


def positive_int(value: object, what: str) -> int:
    number = human_int(value, what)
    if number < 1:
        raise PlanError(f"{what}: expected a number above 0, found {value!r}")
    return number


def positive_float(value: object, what: str, zero: bool = False) -> float:
    """A finite number above 0, or 0 itself where `zero` allows it."""
    try:
        number = float(str(value))
    except ValueError:
        raise PlanError(f"{what}: expected a number, found {value!r}") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise PlanError(f"{what}: expected a finite number above 0, found {value!r}")
    return number


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
