"""The runbooks inside Grafana: docs/runbooks as text panels, so that a panel's link to one works anywhere."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from scripts.dashboards._board import Board
from scripts.dashboards._panels import note

FOLDER = Path("docs/runbooks")
UID = "vllm-runbooks"
_RELATIVE = re.compile(r"\]\((?!https?:|/)([^)#]*)(#[^)]*)?\)")


def panel_id(alert: str) -> int:
    """The same for the same name, whatever other runbooks come and go."""
    return 10_000 + zlib.crc32(alert.encode()) % 1_000_000


def link(alert: str) -> str:
    return f"/d/{UID}?viewPanel={panel_id(alert)}"


def board(folder: Path = FOLDER) -> Board:
    """One panel a file of the folder, and a list of them."""
    files = sorted(path for path in folder.glob("*.md") if path.stem != "README")
    board = Board(UID, "Runbooks", "What each alert means and what to do, from docs/runbooks.")
    contents = "\n".join(f"- [{path.stem}]({link(path.stem)})" for path in files)
    board.line(2 + len(files), (24, note(1, "Runbooks", "One for each alert.", contents)))
    for path in files:
        text = _adapted(path.read_text(encoding="utf-8"), {other.stem for other in files})
        height = 4 + sum(1 + len(line) // 160 for line in text.splitlines())
        what = f"What to do about {path.stem}: {path}."
        board.line(height, (24, note(panel_id(path.stem), path.stem, what, text)))
    return board


def _adapted(text: str, known: set[str]) -> str:
    """Links to other runbooks lead to their panels; to other files they become the file's name."""

    def adapt(found: re.Match[str]) -> str:
        name = Path(found[1])
        return f"]({link(name.stem)})" if name.stem in known else f"] (`{name.name}`)"

    return _RELATIVE.sub(adapt, text)
