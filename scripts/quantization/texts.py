"""Reads conversations and plain texts out of JSONL, text, ShareGPT JSON and hub data sets. Knows no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scripts.quantization import QuantizeError

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
_CHUNK = 1 << 20
_KEYS = ("messages", "conversations", "text", "prompt", "instruction")


@dataclass(frozen=True)
class Text:
    """A conversation; a plain text is one message of a user. group: parts of one conversation share it."""

    key: str
    messages: tuple[dict[str, str], ...]
    group: str


def read(path: Path, kind: str, column: str | None) -> tuple[str, list[Text]]:
    """The kind that was read, and the texts, each once. Raises QuantizeError, in one line, naming file and place."""
    try:
        kind = _guess(path) if kind == "auto" else kind
        with path.open(encoding="utf-8") as file:
            if kind == "sharegpt":
                found = list(_sharegpt(file, path))
            elif kind == "jsonl":
                found = list(_jsonl(file, path, column))
            else:
                found = list(_plain(file))
    except UnicodeDecodeError as error:
        raise QuantizeError(f"calibration.source {path} is not UTF-8 (byte {error.start}): convert it first") from None
    except OSError as error:
        raise QuantizeError(f"calibration.source {path}: {error.strerror}") from None
    return kind, _once(found, str(path))


def read_files(paths: Sequence[Path]) -> list[Text]:
    """Each file is one text. Raises QuantizeError, in one line, naming the file."""
    found = []
    for path in paths:
        try:
            words = path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise QuantizeError(
                f"calibration.source {path} is not UTF-8 (byte {error.start}): convert it first"
            ) from None
        except OSError as error:
            raise QuantizeError(f"calibration.source {path}: {error.strerror}") from None
        if words:
            found.append(_text(words))
    return _once(found, str(paths[0].parent))


def read_rows(rows: Iterable[Mapping[str, Any]], where: str, column: str | None) -> list[Text]:
    """The texts of a hub data set's rows."""
    found = (_of_object(row, f"{where}, row {index}", column) for index, row in enumerate(rows))
    return _once([text for text in found if text is not None], where)


def _guess(path: Path) -> str:
    if path.suffix == ".jsonl":
        return "jsonl"
    with path.open("rb") as file:
        start = file.read(4096).lstrip()
    if path.suffix == ".json" or start.startswith(b"[{"):
        return "sharegpt" if start.startswith(b"[") else "jsonl"
    return "jsonl" if start.startswith(b'{"') else "text"


def _sharegpt(file: IO[str], path: Path) -> Iterator[Text]:
    """One array of objects, object by object: of a file that is cut off, what is whole is used."""
    decoder = json.JSONDecoder()
    buffer, ended = file.read(_CHUNK).lstrip("\ufeff \t\r\n"), False
    if not buffer.startswith("["):
        raise QuantizeError(f"calibration.source {path}: ShareGPT is a JSON array, this starts with {buffer[:20]!r}")
    at, index = 1, 0
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            found, at = decoder.raw_decode(buffer, at)
        except ValueError:
            if ended:
                return  # the rest is cut off
            more = file.read(_CHUNK)
            ended = not more
            buffer, at = buffer[at:] + more, 0
            continue
        text = _of_object(found, f"{path}, object {index}", None)
        index += 1
        if text is not None:
            yield text


def _jsonl(file: IO[str], path: Path, column: str | None) -> Iterator[Text]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"calibration.source {path}, line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise QuantizeError(f"{where} is no JSON: {error}") from None
        text = _of_object(found, where, column)
        if text is not None:
            yield text


def _plain(file: IO[str]) -> Iterator[Text]:
    """A blank line parts two texts."""
    passage: list[str] = []
    for line in [*file, ""]:
        if line.strip():
            passage.append(line)
        elif passage:
            yield _text("".join(passage).strip())
            passage = []


def _of_object(found: object, where: str, column: str | None) -> Text | None:
    """None for what holds no words."""
    if not isinstance(found, Mapping):
        raise QuantizeError(f"{where}: expected an object, found {type(found).__name__}")
    if column is not None and column not in found:
        raise QuantizeError(f"{where}: there is no {column!r} (calibration.column); there are {', '.join(found)}")
    key = column or next((key for key in _KEYS if found.get(key)), None)
    if key is None:
        if any(key in found for key in _KEYS):
            return None
        raise QuantizeError(
            f"{where}: none of {', '.join(_KEYS)} in it, but {', '.join(map(str, found)) or 'nothing'}: "
            "name the field in calibration.column"
        )
    value = found[key]
    if isinstance(value, str):
        answer = next((found[name] for name in ("response", "output", "completion") if found.get(name)), None)
        if key in ("prompt", "instruction") and isinstance(answer, str):
            return _conversation([("user", value), ("assistant", answer)], found)
        return _text(value.strip()) if value.strip() else None
    if isinstance(value, list):
        return _conversation(_turns(value, where), found)
    raise QuantizeError(f"{where}: {key} should be a text or a list of messages, found {type(value).__name__}")


def _turns(messages: list[Any], where: str) -> list[tuple[str, str]]:
    """(role, content); empty where a message is by nobody a chat template knows (a tool, say)."""
    turns = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise QuantizeError(f"{where}: a message should be an object, found {type(message).__name__}")
        said = message.get("content", message.get("value"))
        role = _ROLES.get(str(message.get("role", message.get("from", ""))).lower())
        if role is None or not isinstance(said, str):
            return []
        turns.append((role, said))
    return turns


def _conversation(turns: list[tuple[str, str]], found: Mapping[str, Any]) -> Text | None:
    """From the first user's turn on (a system message before it stays): templates refuse what starts with an answer."""
    first = next((index for index, (role, _) in enumerate(turns) if role == "user"), None)
    if first is None:
        return None
    kept = [turn for turn in turns[:first] if turn[0] == "system"][:1] + turns[first:]
    if not any(said.strip() for _, said in kept):
        return None
    messages = tuple({"role": role, "content": said} for role, said in kept)
    key = str(found.get("id") or _hash(json.dumps(messages)))
    return Text(key, messages, key.rsplit("_", 1)[0] if key.rsplit("_", 1)[-1].isdecimal() else key)


def _text(words: str) -> Text:
    key = _hash(words)
    return Text(key, ({"role": "user", "content": words},), key)


def _hash(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _once(found: list[Text], where: str) -> list[Text]:
    """Without repeats: a text on both sides of the split would flatter the gate."""
    seen: set[str] = set()
    texts = []
    for text in found:
        same = _hash(json.dumps(text.messages))
        if same not in seen:
            seen.add(same)
            texts.append(text)
    if not texts:
        raise QuantizeError(f"calibration.source {where}: no text in it: give one with words, or another format")
    return texts
