"""The runbooks inside Grafana: docs/runbooks as text panels, so that a panel's link to one works anywhere."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from scripts.dashboards._board import Board
from scripts.dashboards._panels import note

FOLDER = Path("docs/runbooks")
UID = "vllm-runbooks"
_LINE = 0.62  # of a grid row, for a line of text
_RELATIVE = re.compile(r"\]\((?!https?:|/)([^)#]*)(#[^)]*)?\)")


def panel_id(alert: str) -> int:
    """The same for the same name, whatever other runbooks come and go."""
    return 10_000 + zlib.crc32(alert.encode()) % 1_000_000


def link(alert: str) -> str:
    return f"/d/{UID}?viewPanel={panel_id(alert)}"


def board(folder: Path = FOLDER) -> Board:
    """One panel a file of the folder, two side by side, after a list of them."""
    files = sorted(path for path in folder.glob("*.md") if path.stem != "README")
    board = Board(UID, "Runbooks", "What each alert means and what to do, from docs/runbooks.")
    contents = "\n".join(f"- [{path.stem}]({link(path.stem)})" for path in files)
    board.line(3 + round(len(files) * _LINE), (24, note(1, "Runbooks", "One for each alert.", contents)))
    known = {path.stem for path in files}
    for pair in (files[first : first + 2] for first in range(0, len(files), 2)):
        texts = [_adapted(path.read_text(encoding="utf-8"), known) for path in pair]
        width = 24 // len(pair)
        panels = (
            (width, note(panel_id(path.stem), path.stem, f"What to do about {path.stem}: {path}.", text))
            for path, text in zip(pair, texts, strict=True)
        )
        board.line(max(map(_height, texts)), *panels)
    return board


def _height(text: str) -> int:
    """Grid rows that a text of half the width needs, roughly: a panel of text can be scrolled."""
    lines = sum(1 + len(line) // 105 if line else 0.5 for line in text.splitlines())
    return 3 + round(lines * _LINE)


def _adapted(text: str, known: set[str]) -> str:
    """Without its title, which is the panel's; links lead to other runbooks' panels, or become the file's name."""

    def adapt(found: re.Match[str]) -> str:
        name = Path(found[1])
        return f"]({link(name.stem)})" if name.stem in known else f"] (`{name.name}`)"

    return _RELATIVE.sub(adapt, re.sub(r"\A# .*\n+", "", text))
