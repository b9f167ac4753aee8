"""The gateway's rooms: who may import whom."""

import ast
import graphlib
import re
from pathlib import Path

import gateway

ROOT = Path(gateway.__file__).parent
# A library with a border of its own: the only rooms that may know it.
HOMES = {
    "fastapi": {"routes", "app"},
    "starlette": {"routes", "app"},
    "uvicorn": {"server", "serving"},
    "httptools": {"server"},
    "aiohttp": {"upstream"},
    "httpx": {"monitor"},
    "opentelemetry": {"tracing"},
    "sqlite3": {"ledger"},
    "scripts": set[str](),
    "tests": set[str](),
}


def imports(source: str) -> set[str]:
    """Every module a source names in an import, wherever it stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def floors() -> dict[str, int]:
    """Room -> floor, as the package's docstring lists them."""
    text = re.sub(r"\n   (?=\S)", " ", gateway.__doc__ or "")
    lines = re.findall(r"^(\d)\. ([^:]+):", text, re.MULTILINE)
    return {room: int(number) for number, rooms in lines for room in rooms.split(", ")}


SOURCES = {path.stem: path.read_text() for path in ROOT.glob("*.py") if path.stem != "__init__"}
IMPORTS = {room: imports(source) for room, source in SOURCES.items()}
OF_ROOMS = {
    room: {name.split(".")[1] for name in names if name.startswith("gateway.")} & SOURCES.keys()
    for room, names in IMPORTS.items()
}


def test_every_room_is_on_the_list_and_every_listed_room_is_there() -> None:
    assert floors().keys() == SOURCES.keys()


def test_rooms_import_downwards_only() -> None:
    floor = floors()
    assert "relay" in OF_ROOMS["inference"], "the imports are not being read"
    assert [(room, other) for room, others in OF_ROOMS.items() for other in others if floor[other] > floor[room]] == []


def test_no_imports_run_in_a_circle() -> None:
    graphlib.TopologicalSorter(OF_ROOMS).prepare()  # raises CycleError, naming the circle


def test_the_first_floor_has_no_event_loop() -> None:
    first = [room for room, floor in floors().items() if floor == 1]
    assert first
    assert [room for room in first for name in IMPORTS[room] if name.split(".")[0] == "asyncio"] == []


def test_libraries_stay_behind_their_borders() -> None:
    strays = [
        (room, name)
        for room, names in IMPORTS.items()
        for name in names
        if room not in HOMES.get(name.split(".")[0], {room})
    ]
    assert strays == []
