"""Rewrites a profile and the gateway's settings, comments kept, and puts them back.

Before the first change both files are copied beside the results; `revert` brings the copies back. A process that dies
leaves the old file or the new one.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from scripts.bench.folder import write


class NothingToRevertError(Exception):
    """No tuned profile was kept here."""


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def read(path: Path) -> dict[str, Any]:
    """The flags or settings of a file."""
    return dict(_yaml().load(path.read_text()) or {})


def rewritten(text: str, changes: Mapping[str, Any], comment: str) -> str:
    """`text` with values changed or added, and `comment` on them at its end. A dot in a name goes into a section."""
    yaml = _yaml()
    document = yaml.load(text)
    for name, value in changes.items():
        *sections, leaf = name.split(".")
        node = document
        for section in sections:
            if section not in node:
                node[section] = {}
            node = node[section]
        node[leaf.replace("-", "_") if leaf.replace("-", "_") in node else leaf] = value  # vLLM reads either spelling
    stream = io.StringIO()
    yaml.dump(document, stream)
    return f"{stream.getvalue().rstrip()}\n\n# {', '.join(changes)}: {comment}\n"


def apply(files: Mapping[Path, str], kept: Path) -> None:
    """Copies the files as they are into `kept`, then puts the new texts in place: all of them, or, where the disk takes
    no more (OSError), none."""
    for path in files:
        write(kept / path.name, path.read_text())
        write(kept / f"{path.name}.path", str(path))
    new = {path: path.with_name(f".{path.name}.new") for path in files}
    try:
        for path, text in files.items():
            write(new[path], text)
        for path, half in new.items():
            half.replace(path)
    finally:
        for half in new.values():
            half.unlink(missing_ok=True)


def revert(kept: Path) -> list[Path]:
    """Puts the copies back and forgets them; the paths that were restored. Raises NothingToRevertError."""
    places = sorted(kept.glob("*.path")) if kept.is_dir() else []
    if not places:
        raise NothingToRevertError(f"nothing to take back: no tuned profile was put in place ({kept})")
    restored = []
    for place in places:
        path = Path(place.read_text().strip())
        copy = place.with_suffix("")
        write(path, copy.read_text())
        copy.unlink()
        place.unlink()
        restored.append(path)
    return restored
