"""From pasted bytes to plain lines: decoding, typographic characters, joined lines."""

import re
from dataclasses import dataclass

LIMIT_BYTES = 2_000_000

# Characters that word processors, chat programs and web pages put in the place of what was typed.
_REPLACED = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},  # full-width ASCII
    **dict.fromkeys(map(ord, "\u3000\u00a0\u2002\u2003\u2009\u202f"), " "),
    **dict.fromkeys(map(ord, "\ufeff\u200b\u200c\u200d\u2060\u00ad"), ""),
    **dict.fromkeys(map(ord, "“”„«»「」『』"), '"'),
    **dict.fromkeys(map(ord, "‘’‚"), "'"),
    ord("，"): ", ",
    ord("；"): "; ",
    ord("（"): " (",
    ord("）"): ") ",
    ord("〜"): "~",
}
_DASHES = "‐‑‒–—―−﹣－⸺"
_CJK = r"\u2e80-\u9fff\uf900-\ufaff"
CJK = re.compile(f"[{_CJK}]")


class InputError(Exception):
    """A paste that cannot be read; the message says why and what to paste instead."""


@dataclass(frozen=True)
class Line:
    """A logical line: continuation lines joined, comments gone. `number` is where it starts, from 1."""

    number: int
    text: str


def decode(raw: bytes) -> str:
    """The text of a paste; InputError for what is no text, or too much of it."""
    if len(raw) > LIMIT_BYTES:
        raise InputError(f"{len(raw):,} bytes are more than a guide: paste at most {LIMIT_BYTES:,}")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return raw.decode("utf-16", errors="replace")
    if b"\x00" in raw:
        raise InputError("this is a binary file: paste a command line or the text of a guide")
    for encoding in ("utf-8-sig", "gb18030"):  # Chinese Windows saves text as the latter
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError:
            continue
        odd = sum(1 for char in text if ord(char) < 32 and char not in "\t\n\r\x1b")
        if odd > len(text) // 100:
            break
        return text
    raise InputError("this is not text in UTF-8, UTF-16 or GB18030: paste a command line or the text of a guide")


def normalise(text: str) -> str:
    """The text as it would have been typed in a terminal, line breaks kept."""
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text.replace("\r\n", "\n").replace("\r", "\n"))
    # Dashes before the translation: a dash at the start of a word stands for what an editor made of `--` or `-`.
    start = rf"(^|[\s\"'“”‘’`(（\[,，;；:：、。{_CJK}])"
    text = re.sub(rf"{start}[{_DASHES}-]*[{_DASHES}][{_DASHES}-]*(?=[A-Za-z])", _typed_dashes, text, flags=re.MULTILINE)
    text = re.sub(rf"(?<=[A-Za-z0-9])[{_DASHES}](?=[A-Za-z0-9])", "-", text)
    return text.translate(_REPLACED)


def _typed_dashes(match: re.Match[str]) -> str:
    """One short hyphen stays a single dash (`‑tp`); anything longer was `--`."""
    dashes = match[0][len(match[1]) :]
    return match[1] + ("-" if dashes in ("‐", "‑", "－", "−", "﹣") else "--")


def logical_lines(text: str) -> tuple[list[Line], set[str]]:
    """Lines with their continuations joined, and what a shell would have choked on in them.

    Continued are lines that end in a backslash, a caret (cmd) or a backtick (PowerShell), blanks after it or not,
    and command lines followed by a line that starts with a flag. The second value holds "blank after backslash" and
    "comment inside a command" where those were found.
    """
    lines: list[Line] = []
    traps: set[str] = set()
    open_line = False
    for number, raw in enumerate(text.split("\n"), 1):
        body, comment = _without_comment(raw)
        stripped = body.strip()
        if comment and not stripped:
            if open_line:
                traps.add("comment inside a command")
            elif comment.strip():  # a line that is only a comment is prose
                lines.append(Line(number, comment.strip()))
            continue
        ends = _continues(body)
        if ends and comment:
            traps.add("comment inside a command")
        elif ends and body.endswith((" ", "\t")) and stripped.endswith("\\"):
            traps.add("blank after backslash")
        if ends:
            stripped = stripped[:-1].rstrip()
        starts_with_flag = re.match(r"--?[A-Za-z]", stripped) is not None
        if lines and (open_line or (starts_with_flag and _is_command(lines[-1], number))):
            lines[-1] = Line(lines[-1].number, f"{lines[-1].text} {stripped}".strip())
        elif stripped:
            lines.append(Line(number, stripped))
        open_line = ends
    return lines, traps


def _continues(body: str) -> bool:
    stripped = body.rstrip()
    if stripped.endswith("\\"):
        return not stripped.endswith("\\\\")
    if stripped.endswith("^"):
        return True
    return stripped.endswith(" `") and stripped.count("`") % 2 == 1


def _is_command(line: Line, number: int) -> bool:
    """Whether a flag on the next line belongs to this one: it reads as a command, and nothing is between."""
    return number - line.number < 60 and bool(re.search(r"(^|\s)--?[A-Za-z]|^(\S+\s)?vllm\s", line.text))


def _without_comment(raw: str) -> tuple[str, str]:
    """A line up to an unquoted ` #`, and the comment; a root prompt (`# vllm serve ...`) is no comment."""
    quote = ""
    for index, char in enumerate(raw):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'" and not (char == "'" and index and raw[index - 1].isalpha()):
            quote = char
        elif char == "#" and (index == 0 or raw[index - 1] in " \t"):
            rest = raw[index + 1 :]
            if not raw[:index].strip() and re.match(r"\s*(sudo\s+)?(vllm|docker|python3?\s+-m\s+vllm)\b", rest):
                return rest, ""
            return raw[:index], rest
    return raw, ""
