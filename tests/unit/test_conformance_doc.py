"""docs/conformance.md names the versions that are installed and claims only what a test looks at."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/conformance.md").read_text()
LOCK = (ROOT / "docker/requirements/clients.txt").read_text()
NODE = json.loads((ROOT / "tests/conformance/node/package-lock.json").read_text())
FILES = {
    "openai (Python)": "test_openai_python.py",
    "openai (node)": "test_openai_node.py",
    "anthropic": "test_anthropic_python.py",
    "langchain-openai": "test_langchain.py",
}
# A row of the table -> words of the names of the tests that look at it.
ROWS = {
    "an answer": r"_answers?\b|_answers?_",
    "streamed, the same text": r"stream",
    "usage in a stream": r"usage",
    "completions: a prompt list": r"prompt_list",
    "a named tool": r"tool",
    "`tool_choice: auto`": r"models_choice",
    "answers by JSON schema": r"schema|structured",
    "models listed": r"models_are_listed",
    "responses": r"responses",
    "embeddings of a model": r"embeddings|errors_are",
    "wrong key": r"wrong_key|errors_are",
    "unknown model": r"unknown_model|errors_are",
    "too long a prompt": r"too_long|errors_are",
    "`max_tokens`, system": r"max_tokens|system",
    "request id": r"request_id|wrong_key",
}


def table() -> dict[str, list[str]]:
    """Row -> its cells, of the page's first table, its heading included."""
    lines = [line.strip("| \n") for line in PAGE.splitlines() if line.startswith("|")]
    first = lines[: next(number for number, line in enumerate(lines) if line.startswith("also"))]
    heading, _, *rows = [re.split(r"\s+\|\s+", line) for line in first]
    return {"": heading, **{cells[0]: cells[1:] for cells in rows}}


def test_python_clients_versions_are_the_locked_ones() -> None:
    named = {"openai": r"openai \(Python\)", "anthropic": "anthropic", "langchain-openai": "langchain-openai"}
    named |= {"llama-models": r"llama-models", "schemathesis": "schemathesis"}
    for package, spelled in named.items():
        locked = re.search(rf"^{package}==(\S+)", LOCK, re.MULTILINE)
        told = re.search(rf"{spelled} (\d[\w.]*\d)", PAGE)
        assert locked is not None
        assert told is not None
        assert told[1] == locked[1], package


def test_nodes_clients_version_is_the_locked_one_and_its_lock_names_no_registry() -> None:
    assert f"openai (node) {NODE['packages']['node_modules/openai']['version']} " in PAGE
    assert "://" not in json.dumps(NODE)


def test_every_row_is_known_here() -> None:
    assert [row for row in table() if row and not any(row.startswith(name) for name in ROWS)] == []


@pytest.mark.parametrize("row", ROWS)
def test_every_claim_of_the_table_has_a_test_of_that_client(row: str) -> None:
    clients = [next(name for name in FILES if cell.startswith(name)) for cell in table()[""]]
    assert len(clients) == len(FILES)
    (cells,) = (cells for name, cells in table().items() if name.startswith(row))
    for client, cell in zip(clients, cells, strict=True):
        source = (ROOT / "tests/conformance" / FILES[client]).read_text()
        names = re.findall(r"^(?:async )?def (test_\w+)", source, re.MULTILINE)
        looked_at = [name for name in names if re.search(ROWS[row], name)]
        assert cell == "–" or looked_at, (client, row)
