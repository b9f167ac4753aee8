"""Set members of a JSON object in its own bytes, so that whoever wrote it finds everything else as it was. Pure.

Parsing and writing again would lose spellings (1e2, escapes, order of duplicates) and round integers beyond 64 bits.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

# What tells where a top-level value ends: strings, brackets, commas. A list of plain numbers is passed in one step.
_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|\[[^]["{]*\]|[][{},]')


def set_members(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """`body`, a valid JSON object, with `fields` set: in place where they are there already, else at its end."""
    body = body.strip()
    pieces, copied, members, missing = [], 0, 0, dict(fields)
    for name, start, end in _members(body):
        members += 1
        if name in fields:
            pieces += [body[copied:start], orjson.dumps(fields[name])]
            copied = end
            missing.pop(name, None)
    body = b"".join([*pieces, body[copied:]])
    if not missing:
        return body
    return body[:-1] + (b"," if members else b"") + orjson.dumps(missing)[1:]


def add_members(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The same for a non-empty object that has none of `fields`: no need to look at what it holds."""
    return body.rstrip()[:-1] + b"," + orjson.dumps(fields)[1:]


def _members(body: bytes) -> Iterator[tuple[str, int, int]]:
    """Name of each top-level member, start and end of its value; one named twice comes twice."""
    depth, name, start = 0, "", -1
    for mark in _MARK.finditer(body):
        sign = body[mark.start()]
        if sign in b"[{" and mark.end() - mark.start() == 1:
            depth += 1
        elif sign in b"]}":
            depth -= 1
            if depth == 0 and start >= 0:
                yield name, start, mark.start()
        elif depth == 1 and sign == ord(","):
            yield name, start, mark.start()
            start = -1
        elif depth == 1 and sign == ord('"') and start < 0:
            name, start = orjson.loads(mark[0]), body.index(b":", mark.end()) + 1
