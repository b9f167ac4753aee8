"""Everything in a paste that can be judged: engine starts with their flags, and what the prose around them mentions."""

import re
from collections.abc import Iterator

from scripts.engine_args import Flag
from scripts.flags import shapes, shell
from scripts.flags.parts import Lookup, Paste, Start
from scripts.flags.shell import PLACEHOLDER, Command, Given
from scripts.flags.text import CJK, Line, logical_lines, normalise

FLAG_IN_TEXT = re.compile(r"(?<![\w/.-])(--[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9])(?:=([^\s,;()\"'`]+)|\s+([\w./:@+-]+))?")
# "set --block-size to 256 or 512", "将 --block-size 设置为256或512"
NUMBERS_AFTER = re.compile(r"[^\d\n.,;。-]{0,12}?(\d+(?:\.\d+)?)(?:\s*(?:或|和|、|/|or)\s*(\d+(?:\.\d+)?))?(?!\d|\s*%)")
METRIC = re.compile(r"(?<![\w/.-])vllm[:：]\s?([a-z][a-z0-9_]*)\b(?![-.:])")
VARIABLE = re.compile(r"(?<![\w$])(?:\$\{?)?(VLLM_[A-Z0-9_]*[A-Z0-9])\}?(?:\s*[=:]\s*[\"']?([^\s\"'`,;)]+))?")
NOT_METRICS = {"latest", "main", "nightly", "cpu", "gpu", "cuda", "stable", "dev"}
OTHER_PROGRAMS = re.compile(
    r"(?:^|[\s`(\"':])(nvidia-smi|curl|wget|pip3?|git|nvcc|conda|apt|apt-get|huggingface-cli|hf|modelscope|kubectl|helm|"
    r"docker|ollama|llama-server|trtllm-serve|sglang|npm|uv|ray|torchrun|deepspeed|awq\.entry|python3?)\s"
)
IGNORED = {"--help", "-h", "--version", "-v"}


def take_apart(text: str, lookup: Lookup) -> Paste:
    """The parts of a paste; `lookup` tells a flag of any release by its name, so that values are not mistaken."""
    plain = normalise(text)
    lines, traps = logical_lines(plain)
    paste = Paste(text=plain, traps=traps)
    paste.starts += [*shapes.python_calls(plain), *shapes.compose_options(plain)]
    lists, lines = shapes.argument_lists(lines)
    for words in lists:
        paste.starts += [_start(command, lookup) for command in shell.commands(words)]
    if config := shapes.config_file(plain, lookup):
        paste.starts.append(config)
        lines = []
    for line in lines:
        _read(line, paste, lookup)
    for number, raw in enumerate(plain.split("\n"), 1):
        _names(raw, number, paste)
    return paste


def _read(line: Line, paste: Paste, lookup: Lookup) -> None:
    """A line is a command or prose; prose may hold commands between backticks."""
    line = Line(line.number, re.sub(r"^(?:command|args|entrypoint):\s*(?:[>|][-+]?)?\s*", "", line.text))
    starts = [] if _is_prose(line.text) else [_start(command, lookup) for command in shell.commands(line)]
    starts = [start for start in starts if start.launcher or len(start.strays) < 2]  # flags in a sentence
    if starts:
        # Flags without a program may be those of a service beside the engine.
        known = [any(lookup(given.name) for given in start.given) for start in starts]
        paste.starts += [s for s, k in zip(starts, known, strict=True) if s.launcher or k or not paste.starts]
        return
    for span in re.findall(r"`+([^`]+)`+", line.text):
        paste.starts += [_start(command, lookup) for command in shell.commands(Line(line.number, span))]
    paste.mentions += _flags_in_prose(Line(line.number, re.sub(r"`+[^`]+`+", " ", line.text)), lookup)


def _is_prose(text: str) -> bool:
    """Chinese outside quotes means prose, unless the line plainly starts a program."""
    outside = re.sub(r"\"[^\"]*\"|'[^']*'", "", shell.PROMPT.sub("", text))
    starts_program = re.match(r"(?:\w+=\S+\s+)*(?:sudo\s+)?(?:vllm|docker|python3?)[\s-]", outside)
    return bool(CJK.search(outside)) and not starts_program


def _start(command: Command, lookup: Lookup) -> Start:
    given, strays = pair(command.words, command.line, lookup)
    start = Start(command.launcher, command.line, given, None, strays, command.env, command.docker, command.image)
    if start.launcher in ("vllm serve", "vllm-entrypoint") and strays:
        start.model, start.strays = strays[0], strays[1:]
    if start.model and PLACEHOLDER.match(start.model):
        start.model = None
    start.strays = [stray for stray in start.strays if not PLACEHOLDER.match(stray)]
    return start


def pair(words: list[str], line: int, lookup: Lookup) -> tuple[list[Given], list[str]]:
    """Flags with the values that belong to them, and the words that belong to none."""
    given: list[Given] = []
    strays: list[str] = []
    words = [word for word in words if word != "\\"]
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z]", word):
            strays.append(word)
            continue
        if attached := re.fullmatch(r"-O=?(\w+)", word):
            given.append(Given("--optimization-level", (attached[1],), line))
            continue
        name, equals, value = word.partition("=")
        if equals:
            given.append(Given(name, (value,), line, joined=True))
            continue
        taken = _values(words, at, lookup(name), dotted="." in name)
        at += len(taken)
        given.append(Given(name, tuple(taken), line))
    return [one for one in given if one.name not in IGNORED], strays


def _values(words: list[str], at: int, flag: Flag | None, *, dotted: bool) -> list[str]:
    """Those of the words from `at` on that are a flag's values."""
    following = []
    for index in range(at, len(words)):
        if re.match(r"--?[A-Za-z]", words[index]):
            break
        following.append(words[index])
    if flag is None or dotted:
        return following[:1] if following and not ("/" in following[0] and not dotted) else []
    if flag.form in ("switch", "boolean"):  # a truth value there is a mistake to be told, not a model
        return following[:1] if following and following[0].lower() in ("true", "false") else []
    return following if flag.form == "list" else following[:1]


def _flags_in_prose(line: Line, lookup: Lookup) -> Iterator[Given]:
    """Flags that a sentence names, with the values it gives them; those of other programs are left out."""
    for run in re.split(r"(?<=[。!?！？])|\n", line.text):
        for match in FLAG_IN_TEXT.finditer(run):
            name = match[1].rstrip(".-_")
            before = re.split(f"{CJK.pattern}|[,;] ", run[: match.start()])[-1]
            if name in IGNORED or OTHER_PROGRAMS.search(before + " "):
                continue
            flag = lookup(name)
            values = _values_in_prose(match, run, flag)
            if not values:
                yield Given(name, (), line.number)
            yield from (Given(name, (value,), line.number) for value in values)


def _values_in_prose(match: re.Match[str], run: str, flag: Flag | None) -> list[str]:
    if match[2]:
        return [match[2].rstrip(".。,")]
    if flag is None or flag.form in ("switch", "boolean"):
        return []
    word = (match[3] or "").rstrip(".,:")
    known = {str(option).lower().replace("-", "_") for option in (*flag.choices, *flag.suggested)}
    if re.fullmatch(r"\d[\d.]*[kKmMgG]?", word) or word.lower().replace("-", "_") in known:
        return [word]
    numeric = flag.type in ("int", "float") or str(flag.type).startswith("human_readable")
    if numeric and (numbers := NUMBERS_AFTER.match(run[match.end(1) :])):
        return [number for number in numbers.groups() if number]
    return []


def _names(text: str, number: int, paste: Paste) -> None:
    """Metric and variable names of a line."""
    for match in METRIC.finditer(text):
        if match[1] not in NOT_METRICS and "image:" not in text:
            paste.metrics.setdefault(f"vllm:{match[1]}", number)
    for match in VARIABLE.finditer(text):
        paste.variables.setdefault(match[1], (match[2], number))
