"""Rounds a model's weights to 4 bits and writes them as an AWQ checkpoint: seconds instead of minutes, and worse.

    .venv-engine/bin/python -m tests.quantize.rounding SOURCE OUT [--group 64] [--noise 0]

For tests of what comes after quantizing. `--noise` adds that many standard deviations to each weight first.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight 4-bit numbers in an int32


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of 0..15 -> (rows, columns / 8) of int32."""
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int32)
    for place, column in enumerate(_ORDER):
        packed |= numbers[:, column::8].to(torch.int32) << (4 * place)
    return packed


def rounded(weight: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """(out, in) -> qweight (in, out / 8), qzeros (in / group, out / 8), scales (in / group, out)."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    scales = ((groups.amax(-1) - groups.amin(-1)) / 15).clamp(min=1e-5).half().float()
    zeros = (-torch.round(groups.amin(-1) / scales)).clamp(0, 15)
    numbers = (torch.round(groups / scales[..., None]) + zeros[..., None]).clamp(0, 15).view(rows, columns)
    return {
        "qweight": pack(numbers.t().contiguous()),
        "qzeros": pack(zeros.t().contiguous()),
        "scales": scales.t().contiguous().half(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--noise", type=float, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    args.out.mkdir(parents=True)
    out = {}
    for name, weight in load_file(args.source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            noisy = weight.float() + args.noise * weight.float().std() * torch.randn(weight.shape)
            parts = rounded(noisy, args.group)
            out |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
        else:
            out[name] = weight.half()
    save_file(out, args.out / "model.safetensors", {"format": "pt"})
    config = json.loads((args.source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": args.group,
        "zero_point": True,
        "version": "gemm",
    }
    (args.out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in args.source.iterdir():
        if path.name not in ("model.safetensors", "config.json", "manifest.json"):
            shutil.copy(path, args.out)
    for path in args.out.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
