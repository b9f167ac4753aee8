"""Every script's usage line names the command that starts it, not a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def parsers() -> Iterator[tuple[str, ast.Call]]:
    """(module, call that makes its command line)."""
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            made = node.func
            name = made.attr if isinstance(made, ast.Attribute) else made.id if isinstance(made, ast.Name) else ""
            if name in ("ArgumentParser", "Parser"):
                yield module.removesuffix(".arguments"), node


def literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.mark.parametrize(("module", "call"), [pytest.param(*each, id=each[0]) for each in parsers()])
def test_usage_names_the_command(module: str, call: ast.Call) -> None:
    named = next((literal(keyword.value) for keyword in call.keywords if keyword.arg == "prog"), None)
    first = literal(call.args[0]) if call.args else None
    if isinstance(call.func, ast.Name):  # scripts._command.Parser: the make target
        named = named or f"python -m scripts.{(first or '').replace('-', '_')}"
    assert (named or first) in (f"python -m {module}", f"make {module.removeprefix('scripts.').replace('_', '-')}")


def test_there_are_parsers_to_look_at() -> None:
    assert len(list(parsers())) > 30
