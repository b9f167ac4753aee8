"""Bars as inline SVG, in the colours of the page they stand in (--original, --artifact, --bad, --ink, --soft). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _TEXT = 440, 13


def stack(pictures: Sequence[str]) -> str:
    return "".join(pictures)


def pair(title: str, original: float, artifact: float, form: str, limit: float | None = None) -> str:
    """Two bars from the same zero, and a line for the limit. A value far beyond is cut, and its number told."""
    left, right, top, height = 70, 76, 22 if title else 6, 20
    most = max(original, min(artifact, 3 * max(original, limit or 0)), limit or 0) or 1
    inner = _WIDTH - left - right
    end = top + 2 * (height + 6)
    line = left + (limit or 0) / most * inner
    out = [_open(end + 4)]
    if title:
        out.append(_text(0, 14, title, "var(--ink)"))
    for row, (name, value) in enumerate((("original", original), ("artifact", artifact))):
        y = top + row * (height + 6)
        width = max(1.0, min(value, most) / most * inner)
        out.append(_text(0, y + 15, name, "var(--soft)"))
        out.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{height}" fill="var(--{name})"/>')
        cut = " (cut)" if value > most else ""
        after = left + width
        if limit is not None and line - 60 < after <= line:  # the number would lie on the line
            after = line
        out.append(_text(after + 6, y + 15, form.format(value) + cut, "var(--ink)"))
    if limit is not None:
        x = line
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{end}" stroke="var(--bad)" stroke-width="2"/>')
    return "".join([*out, "</svg>"])


def columns(names: Sequence[str], values: Sequence[float], form: str, few: int = 12) -> str:
    """A column each, its value above where there is room: where there are more than `few`, only on the tallest."""
    height, top, bottom = 120, 20, 22
    most = max(values, default=0) or 1
    step = _WIDTH / max(1, len(values))
    tallest = max(range(len(values)), key=lambda index: values[index], default=0)
    out = [_open(top + height + bottom)]
    every = max(1, -(-len(values) // 16))
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        tall = value / most * height
        x, y = index * step, top + height - tall
        title = f"<title>{escape(name)}: {form.format(value)}</title>"
        out.append(
            f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{max(tall, 0.5):.1f}" '
            f'fill="var(--artifact)">{title}</rect>'
        )
        if len(values) <= few or index == tallest:
            out.append(_text(x + step / 2, y - 5, form.format(value), "var(--ink)", "middle"))
        if index % every == 0:
            out.append(_text(x + step / 2, top + height + 16, name, "var(--soft)", "middle"))
    return "".join([*out, "</svg>"])


def _open(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="{_TEXT}">'
    )


def _text(x: float, y: float, text: str, fill: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
