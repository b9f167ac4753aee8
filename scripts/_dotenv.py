"""One value of the .env file, changed in its place. scripts/checks/envfile.py reads it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def with_value(text: str, name: str, value: str) -> str:
    """The file with NAME=value: in the place of its last assignment, else below the comment that shows its default."""
    lines = text.splitlines()
    line = f"{name}={value}"
    set_at = [number for number, each in enumerate(lines) if re.match(rf"(?:export )?{name}=", each)]
    shown_at = [number for number, each in enumerate(lines) if re.match(rf"#\s?{name}=", each)]
    if set_at:
        lines[set_at[-1]] = line
    elif shown_at:
        lines.insert(shown_at[-1] + 1, line)
    else:
        lines.append(line)
    return "\n".join(lines) + "\n"


def record(path: Path, name: str, value: str) -> None:
    """Whole or not at all, with the file's own mode. Raises OSError."""
    text = with_value(path.read_text(encoding="utf-8"), name, value)
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(path, part)
    part.replace(path)
