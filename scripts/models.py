"""Lists the models of MODELS_DIR and their versions: what is served, what was before, and what the gate found.

    python -m scripts.models [NAME] [--json]

Exit codes: 0 listed, 1 something is wrong (a link that leads nowhere, a manifest that can't be read; listed as well),
2 wrong usage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts._command import Parser
from scripts.quantization import QuantizeError
from scripts.quantization.store import CURRENT, PREVIOUS, Version, models_dir, names, target, versions

_COLUMNS = ("", "version", "made by", "GiB", "gate", "ppl", "KL", "top-1", "tok/s", "made")


def row(version: Version) -> dict[str, Any]:
    """Its manifest's figures; None where there are none."""
    manifest = version.manifest
    gate = (manifest.gate if manifest else None) or {}
    figures, speed = gate.get("figures") or {}, (gate.get("speed") or {}).get("artifact") or {}
    weights = sum(path.stat().st_size for path in version.path.glob("*.safetensors"))
    return {
        "name": version.name,
        "version": version.version,
        "current": version.current,
        "previous": version.previous,
        "made_by": manifest.producer if manifest else None,
        "made_at": manifest.run.finished_at if manifest else None,
        "weight_bytes": weights,
        "verdict": gate.get("verdict"),
        "ppl_rise": figures.get("ppl_rise"),
        "kl_mean": figures.get("kl_mean"),
        "top1": figures.get("top1"),
        "tokens_per_s": speed.get("tokens_per_s_together"),
        "problem": version.problem or None,
    }


def problems(models: Path, name: str, found: Sequence[Version]) -> list[str]:
    """What is wrong with a model's links and manifests, a line each."""
    out = [version.problem for version in found if version.problem]
    there = {version.version for version in found}
    for link in (CURRENT, PREVIOUS):
        named = target(models / name, link)
        if named is not None and named not in there:
            way = "make promote, or make revert" if link == CURRENT else "it goes with the next promotion"
            out.append(f"{models / name / link} leads to {named}, which is not there: {way}")
    return out


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Columns as wide as their widest cell."""
    cells = [_COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(_COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        "served" if found["current"] else "before" if found["previous"] else "",
        found["version"],
        found["made_by"] or "fetched",
        f"{found['weight_bytes'] / 2**30:.2f}",
        found["verdict"] or "-",
        _form(found["ppl_rise"], "{:+.1%}"),
        _form(found["kl_mean"], "{:.3f}"),
        _form(found["top1"], "{:.3f}"),
        _form(found["tokens_per_s"], "{:,.0f}"),
        (found["made_at"] or "-")[:16].replace("T", " "),
    )


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("models", description="List models and their versions.")
    parser.add_argument("name", nargs="?", help="only this model")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args(argv)
    models = models_dir(os.environ)
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    try:
        wanted = [args.name] if args.name else names(models)
        for name in wanted:
            try:
                found = versions(models, name)
            except QuantizeError as error:
                if args.name:
                    raise
                wrong.append(str(error))
                continue
            rows += map(row, found)
            wrong += problems(models, name, found)
            if not args.json:
                print(f"{name}\n" + "\n".join(f"  {line}" for line in table([row(each) for each in found])))
    except QuantizeError as error:
        print(f"models: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"dir": str(models), "versions": rows, "problems": wrong}))
    elif not rows and not wrong:
        print(f"{models} holds no model with versions: make quantize, make model")
    for problem in wrong:
        print(f"models: {problem}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
