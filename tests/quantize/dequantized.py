"""Original and artifact in plain torch, over the whole vocabulary: the figures that the gate only bounds.

    .venv-quantize/bin/python -m tests.quantize.dequantized ORIGINAL ARTIFACT WINDOWS.json

WINDOWS.json: lists of token ids. Prints one JSON object: tokens, ppl_original, ppl_artifact, kl_mean (nats), top1.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from safetensors.torch import load_file  # type: ignore[import-not-found]
from transformers import AutoConfig, AutoModelForCausalLM  # type: ignore[import-not-found]

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ's order of the eight 4-bit numbers in an int32


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """(rows, columns / 8) of int32 -> (rows, columns) of 0..15."""
    out = torch.empty(packed.shape[0], packed.shape[1] * 8, dtype=torch.int32)
    for place, column in enumerate(_ORDER):
        out[:, column::8] = (packed >> (4 * place)) & 15
    return out


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    """An AWQ checkpoint's weights in float32."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    group = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]["group_size"]
    out = {}
    for name, tensor in found.items():
        stem, _, part = name.rpartition(".")
        if part == "qweight":
            zeros = unpack(found[f"{stem}.qzeros"]).repeat_interleave(group, 0)
            scales = found[f"{stem}.scales"].float().repeat_interleave(group, 0)
            out[f"{stem}.weight"] = ((unpack(tensor) - zeros).float() * scales).t().contiguous()
        elif part not in ("qzeros", "scales"):
            out[name] = tensor.float()
    return out


def model(path: Path, weights: dict[str, torch.Tensor] | None) -> torch.nn.Module:
    if weights is None:
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(str(path))
    del config.quantization_config
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = made.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embeddings
    made.tie_weights()
    return made.eval()


@torch.no_grad()
def main() -> None:
    original, artifact = (Path(argument) for argument in sys.argv[1:3])
    left, right = model(original, None), model(artifact, dequantized(artifact))
    windows = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
    kl = nll_left = nll_right = 0.0
    agreed = tokens = 0
    for window in windows:
        ids = torch.tensor([window])
        p, q = (torch.log_softmax(each(ids).logits[0, :-1].float(), -1) for each in (left, right))
        kl += float((p.exp() * (p - q)).sum())
        truth = ids[0, 1:, None]
        nll_left -= float(p.gather(1, truth).sum())
        nll_right -= float(q.gather(1, truth).sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(window) - 1
    found = {
        "tokens": tokens,
        "ppl_original": math.exp(nll_left / tokens),
        "ppl_artifact": math.exp(nll_right / tokens),
        "kl_mean": kl / tokens,
        "top1": agreed / tokens,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
