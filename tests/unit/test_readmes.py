"""The two READMEs say the same: every command, code block, figure and link of the one is in the other.

What only the Chinese one has (for readers who come from Chinese guides) stands between two comments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.checks.probes import ROOT

ENGLISH, CHINESE = "README.md", "README.zh.md"
_ONLY_CHINESE = re.compile(r"<!-- 以下一节只在中文版 -->.*?<!-- 以上一节只在中文版 -->", re.DOTALL)
_FENCED = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    \S.*$", re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def shared(name: str) -> str:
    return _ONLY_CHINESE.sub("", read(name))


def code(text: str) -> list[str]:
    """Code, wherever it stands, without its comments: those are prose."""
    blocks = [line for block in _FENCED.findall(text) for line in block.splitlines()] + _INDENTED.findall(text)
    rest = _INDENTED.sub("", _FENCED.sub("", text))
    return [re.sub(r"\s+#.*$", "", line).strip() for line in blocks] + _SPAN.findall(rest)


def commands(text: str) -> set[str]:
    return {piece for piece in code(text) if piece.startswith("make ")}


def pieces(text: str) -> set[str]:
    return {piece for piece in code(text) if piece}


def figures(text: str) -> set[str]:
    """All numbers but those of link addresses."""
    return set(re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d", re.sub(r"\]\([^)]*\)", "]", text)))


def links(text: str) -> set[str]:
    """Where it leads, but from one README to the other."""
    return set(re.findall(r"\]\(([^)]+)\)", text)) - {ENGLISH, CHINESE}


@pytest.mark.parametrize("found", [commands, pieces, figures, links])
def test_both_readmes_hold_the_same(found: Callable[[str], set[str]]) -> None:
    english, chinese = found(shared(ENGLISH)), found(shared(CHINESE))
    assert english
    assert {"README.md only": english - chinese, "README.zh.md only": chinese - english} == {
        "README.md only": set(),
        "README.zh.md only": set(),
    }


def test_a_difference_would_be_seen() -> None:
    english = shared(ENGLISH)
    assert commands(english.replace("make up-cpu", "make up-gpu")) != commands(english)
    assert figures(english.replace("3 GB", "5 GB")) != figures(english)
    assert pieces(english.replace("`ledger.path`", "`ledger.file`")) != pieces(english)


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_every_link_of_a_readme_leads_somewhere(name: str) -> None:
    local = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", read(name)) if "://" not in target]
    assert local
    assert [target for target in local if not Path(ROOT / target).exists()] == []


@pytest.mark.parametrize("name", [ENGLISH, CHINESE])
def test_every_make_target_of_a_readme_exists(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {command.split()[1] for command in commands(read(name))} <= targets


def test_the_chinese_one_points_to_the_chinese_answers() -> None:
    only = "".join(_ONLY_CHINESE.findall(read(CHINESE)))
    assert "docs/flags.zh.md" in only
    assert "--lang zh" in only


def test_what_the_chinese_one_says_of_the_guides_figures_is_what_the_table_says() -> None:
    only = "".join(_ONLY_CHINESE.findall(read(CHINESE)))
    table = read("docs/flags.zh.md")
    for figure in ("14.96 GiB", "5.33 GiB", "15.6 GB", "6.2 GB", "只命中其中 256 个", "3.2 → 18.7 req/s"):
        assert figure in only
        assert figure in table, f"{figure} is no longer what docs/flags.zh.md says"
