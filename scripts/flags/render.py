"""The answer for a reader at a terminal: aligned, wrapped to its width, coloured where it can be."""

import dataclasses
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.wording import several
from scripts.flags.finding import Finding
from scripts.flags.profile import Profile
from scripts.flags.text import CJK
from scripts.flags.truth import Say

COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}
MARKS = {True: ("✗", "red"), False: ("✓", "green")}
WORDS = {
    "real": "存在",
    "harmless": "多余无害",
    "harmful": "有害",
    "renamed": "应改写",
    "removed": "已移除",
    "never existed": "从未存在",
    "unknown": "查无此项",
    "not yet": "尚未引入",
    "wrong value": "写法错误",
    "wrong": "说法错误",
    "unverifiable": "无法证实",
}
KINDS = {
    "trap": ("In the shell", "命令写法"),
    "program": ("How it is started", "启动方式"),
    "flag": ("Flags", "参数"),
    "docker": ("Docker", "Docker"),
    "variable": ("Environment variables", "环境变量"),
    "metric": ("Metrics", "监控指标"),
    "claim": ("Claims", "说法"),
}
OPENING = "（「『“‘(["  # never at its end
CLOSING = "，。；：、！？）」』”’,.;:!?)"  # never at the start of a line


@dataclass(frozen=True)
class Style:
    """How to print: language, width in columns, and whether colours are understood."""

    lang: str = "en"
    width: int = 100
    colour: bool = False

    def paint(self, text: str, colour: str) -> str:
        """`text` in a colour, where there are colours."""
        return f"\033[{COLOURS[colour]}m{text}\033[0m" if self.colour else text

    def pick(self, english: str, chinese: str) -> str:
        """The text in the style's language."""
        return chinese if self.lang == "zh" else english


def columns(text: str) -> int:
    """How many terminal columns a text takes: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` columns, broken at blanks and between Chinese characters."""
    lines, current = [], ""
    room = width - 2 if CJK.search(text) else width  # two columns are kept for a closing mark, which may not move on
    for atom in re.findall(r"\s+|[\u2e80-\u9fff\uf900-\uffef]|[^\s\u2e80-\u9fff\uf900-\uffef]+", text):
        if not current or columns(current + atom) <= (width if atom in CLOSING else room):
            current += atom
        else:
            moved = current[-1] if current[-1] in OPENING else ""
            lines.append(current.removesuffix(moved).rstrip())
            current = moved + atom.lstrip()
    return [*lines, current.rstrip()] if current.strip() else lines


def report(findings: list[Finding], profile: Profile, version: str, origin: str, source: str, style: Style) -> str:
    """The whole answer."""
    changes = sum(finding.change for finding in findings)
    head = style.pick(
        f"vLLM {version} ({'its own parser' if origin == 'live parser' else 'read from its source'}): "
        f"{several(len(findings), 'thing')} found, {changes} to change",
        f"vLLM {version}（{'依据其自身解析器' if origin == 'live parser' else '依据其源码'}）："
        f"共识别 {len(findings)} 项，需要修改 {changes} 项",
    )
    lines = [*(style.paint(part, "bold") for part in wrap(head, style.width)), ""]
    for kind, titles in KINDS.items():
        chosen = merged([finding for finding in findings if finding.kind == kind])
        if chosen:
            lines += [style.paint(style.pick(*titles), "bold"), *_rows(chosen, style), ""]
    lines += _profile(profile, version, source, style)
    return "\n".join(lines).rstrip() + "\n"


def merged(findings: list[Finding]) -> list[Finding]:
    """Findings of which the same is to be said, in one row: `--block-size 256, 512`."""
    rows: dict[object, Finding] = {}
    for finding in findings:
        said = finding.subject.en if finding.entry is None else finding.subject.en.split(" ")[0]
        key = (finding.entry, finding.why.en, said)
        if key in rows and (first := rows[key].subject) != finding.subject:
            more = f", {finding.subject.en.split(' ', 1)[-1]}"
            finding = dataclasses.replace(rows[key], subject=Say(en=first.en + more, zh=first.zh + more))
        rows[key] = finding
    return list(rows.values())


def _rows(findings: list[Finding], style: Style) -> Iterator[str]:
    """Rows of a section: mark, subject, verdict in its own column; below it why, what to write, what it costs."""
    room = min(44, max(columns(f.subject.to(style.lang)) for f in findings))
    for finding in findings:
        mark, colour = ("?", "yellow") if finding.verdict == "unverifiable" else MARKS[finding.change]
        subject = finding.subject.to(style.lang)
        verdict = style.pick(finding.verdict, WORDS[finding.verdict])
        if finding.gone_in:
            verdict = style.pick(f"{finding.verdict}, gone in {finding.gone_in}", f"{verdict}（{finding.gone_in} 起）")
        if columns(subject) > room or room + columns(verdict) + 6 > style.width:
            first, *rest = wrap(subject, style.width - 4)
            yield f"  {style.paint(mark, colour)} {style.paint(first, 'bold')}"
            yield from (f"    {style.paint(part, 'bold')}" for part in rest)
            yield f"    {style.paint(verdict, colour)}"
        else:
            gap = " " * (room - columns(subject) + 2)
            yield f"  {style.paint(mark, colour)} {style.paint(subject, 'bold')}{gap}{style.paint(verdict, colour)}"
        yield from _indented(finding.why.to(style.lang), style)
        if finding.effect:
            measured = finding.effect.to(style.lang)
            if finding.hardware:
                where = finding.hardware.to(style.lang)
                measured += style.pick(f" (measured on {where})", f"（实测环境：{where}）")
            yield from _indented(measured, style, "dim")
        if finding.write:
            yield from _indented("→ " + finding.write.to(style.lang), style, "green")


def _indented(text: str, style: Style, colour: str = "") -> Iterator[str]:
    for part in wrap(text, style.width - 6):
        yield "      " + (style.paint(part, colour) if colour else part)


def _profile(profile: Profile, version: str, source: str, style: Style) -> list[str]:
    """The profile and env lines, ready to copy: not indented, not wrapped, not coloured."""
    lines = [*wrap(profile.why_none.to(style.lang), style.width), ""] if profile.why_none else []
    if profile.settings:
        title = style.pick(
            "Profile (configs/engine/NAME.yaml; only what is real and not harmful)",
            "可直接使用的配置（configs/engine/NAME.yaml；只保留真实且无害的参数）",
        )
        lines += [style.paint(title, "bold"), profile.yaml(version, source).rstrip(), ""]
    if profile.env:
        lines += [
            style.paint(style.pick("For the env file (.env)", "写入环境文件（.env）"), "bold"),
            profile.env_lines(),
        ]
    return lines
