"""Whether a value fits a flag, and what it is in a config file."""

import json
import re
from typing import Any

from scripts.engine_args import Flag
from scripts.flags.shell import Given
from scripts.flags.truth import Say

MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TRUTHS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}


class MisfitError(Exception):
    """A value that the parser, or the engine right after it, refuses. `instead` is the value to write, where known."""

    def __init__(self, en: str, zh: str, instead: Any = None) -> None:
        super().__init__(en)
        self.say = Say(en=en, zh=zh)
        self.instead = instead


def is_variable(value: str) -> bool:
    """Whether a shell variable is in it: nothing to check, and a config file would not expand it."""
    return re.search(r"\$\{?\w", value) is not None


def fit(flag: Flag, given: Given) -> Any:
    """The value as a config file holds it; MisfitError says what is wrong with it."""
    if flag.form in ("switch", "boolean"):
        return _truth(flag, given)
    if not given.values or given.values == ("",):
        if flag.form == "optional":
            return True
        raise MisfitError("It needs a value and has none.", "该参数需要一个取值，这里没有给出。")
    if "." in given.name and str(flag.type).startswith("json"):
        return _nested(given)
    if flag.form == "list":
        return [_scalar(flag, value) for value in given.values]
    return _scalar(flag, given.values[0] if len(given.values) == 1 else " ".join(given.values))


def _truth(flag: Flag, given: Given) -> bool:
    negative = flag.negative is not None and given.name.replace("_", "-") == flag.negative
    if not given.values:
        return not negative
    wanted = TRUTHS.get(given.values[0].lower())
    form = flag.name if wanted is not False else flag.negative or "nothing: delete it"
    raise MisfitError(
        f"A switch takes no value: the parser refuses {given.values[0]}. Write {form}.",
        f"开关参数不带取值：解析器会拒绝 {given.values[0]}。应写 {form if flag.negative else '：直接删除'}。",
        instead=wanted,
    )


def _scalar(flag: Flag, value: str) -> Any:
    if is_variable(value):
        return value
    kind = flag.type or "str"
    if kind.startswith("human_readable_int"):
        return _human_int(value, auto=kind.endswith("auto"))
    if kind in ("int", "float"):
        return _chosen(flag, _number(kind, value))
    if kind.startswith("json"):
        return _json(flag, value, strict=kind == "json")
    return _chosen(flag, value)


def _chosen(flag: Flag, value: Any) -> Any:
    """The value, if it is one of the flag's; names of an enumeration are taken in letters of any case."""
    options = [str(option) for option in (flag.choices or flag.suggested) if option is not None]
    text = str(value)
    if not options or text in options or (flag.suggested and text.upper() in [option.upper() for option in options]):
        return value
    near = [option for option in options if _plain(option) == _plain(text)]
    listed = ", ".join(options[:12]) + (", …" if len(options) > 12 else "")
    hint_en, hint_zh = (f" Write {near[0]}.", f"应写 {near[0]}。") if near else ("", "")
    raise MisfitError(
        f"{text} is none of its values: {listed}.{hint_en}",
        f"{text} 不在可取值之内：{listed}。{hint_zh}",
        instead=near[0] if near else None,
    )


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _number(kind: str, value: str) -> int | float:
    try:
        return int(value) if kind == "int" else float(value)
    except ValueError:
        what = ("a whole number", "整数") if kind == "int" else ("a number", "数字")
        raise MisfitError(f"{value} is not {what[0]}.", f"{value} 不是{what[1]}。") from None


def _human_int(value: str, *, auto: bool) -> Any:
    """The engine's own reading: 2k is 2000, 2K is 2048, decimals only with small letters."""
    if auto and value.lower() in ("auto", "-1"):
        return "auto"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", value.strip())
    if not match or ("." in match[1] and match[2] not in tuple("kmgt")):
        raise MisfitError(
            f"{value} is not a size such as 8192, 8k (8000) or 8K (8192).",
            f"{value} 不是合法的大小，例如 8192、8k（=8000）或 8K（=8192）。",
        )
    return int(float(match[1]) * MULTIPLES.get(match[2], 1))


def _json(flag: Flag, value: str, *, strict: bool) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        if not strict:
            return value
    pairs = re.fullmatch(r"\w+=\d+(,\w+=\d+)*", value)
    if pairs:  # the form of old releases: image=2,video=1
        found = {key: int(number) for key, number in (pair.split("=") for pair in value.split(","))}
        text = json.dumps(found)
        raise MisfitError(
            f"The old form; it takes JSON now: '{text}'.", f"旧写法；现在要写 JSON：'{text}'。", instead=found
        )
    raise MisfitError(
        f"{value} is no valid JSON: quote it whole, '{{\"key\": 1}}', or write {flag.name}.key 1.",
        f"{value} 不是合法的 JSON：请整体加引号，如 '{{\"key\": 1}}'，或写成 {flag.name}.key 1。",
    )


def _nested(given: Given) -> dict[str, Any]:
    """`--json-flag.a.b 1` as {"a": {"b": 1}}."""
    text = given.values[0]
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(given.name.split(".")[1:]):
        value = {key.removesuffix("+"): [value] if key.endswith("+") else value}
    assert isinstance(value, dict)
    return value
