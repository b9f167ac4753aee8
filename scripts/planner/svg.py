"""The bar as an SVG file: text and rectangles only, readable on a light and on a dark page."""

from html import escape

from scripts.planner.memory import Plan
from scripts.planner.numbers import GIB
from scripts.planner.render import segments

_COLOURS = {
    "weights": "#3b6ea8",
    "engine buffers": "#7a5aa6",
    "non-torch, slack": "#a65a8f",
    "transient peak": "#c8763a",
    "CUDA graphs": "#b8a13a",
    "KV cache": "#3f9b6b",
    "outside the engine's share": "#9aa0a6",
}
_WIDTH, _LEFT, _BAR_TOP, _BAR_HEIGHT, _ROW = 760, 20, 56, 44, 24


def svg(plan: Plan) -> str:
    shown = segments(plan)
    total = sum(size for _, _, size in shown)
    inner = _WIDTH - 2 * _LEFT
    height = _BAR_TOP + _BAR_HEIGHT + 28 + _ROW * ((len(shown) + 1) // 2)
    card = plan.gpu.name if plan.gpu else "CPU build"
    kind = "estimate" if plan.is_estimate else "pool size given"
    frame = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    title = f"{plan.model.name} on {card}"
    tokens = max(plan.capacity().tokens, 0)
    pool = f"of which the KV cache {max(plan.pool, 0) / GIB:.2f} GiB = {tokens:,} tokens ({kind})"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="16" font-weight="600" fill="#1f2328">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="44" fill="#57606a">{plan.total / GIB:.2f} GiB, {pool}</text>',
    ]
    at = 0
    for name, _, size in shown:
        x = _LEFT + at * inner / total
        at += size
        out.append(
            f'<rect x="{x:.2f}" y="{_BAR_TOP}" width="{size * inner / total:.2f}" height="{_BAR_HEIGHT}" '
            f'fill="{_COLOURS[name]}"><title>{escape(name)}</title></rect>'
        )
    for i, (name, _, size) in enumerate(shown):
        x = _LEFT + (i % 2) * inner // 2
        y = _BAR_TOP + _BAR_HEIGHT + 28 + (i // 2) * _ROW
        out.append(f'<rect x="{x}" y="{y - 11}" width="13" height="13" fill="{_COLOURS[name]}"/>')
        out.append(f'<text x="{x + 20}" y="{y}" fill="#1f2328">{escape(name)} {size / GIB:.2f} GiB</text>')
    return "\n".join([*out, "</svg>", ""])
