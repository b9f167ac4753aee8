"""The table of cards (configs/gpus.yaml)."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.planner import PlanError
from scripts.planner.numbers import GIB, positive_float, positive_int

TABLE = Path(__file__).parents[2] / "configs" / "gpus.yaml"


@dataclass(frozen=True)
class Gpu:
    """engine_total_bytes: what the engine sees as the card's memory, always less than the driver's own figure.

    total_band: how far that figure may be off, as a share of it. It moves with the driver (23.56 and 23.68 GiB were
    both seen of one model), more where the table's figure is derived, not at all where the caller read it.
    """

    key: str
    name: str
    sm: int
    memory_mib: int
    engine_total_bytes: int
    total_band: float
    bandwidth_gb_s: int

    @property
    def big(self) -> bool:
        """The class of cards for which the engine's defaults are larger (70 GiB and up, A100 excepted)."""
        return self.engine_total_bytes >= 70 * GIB and "A100" not in self.name


def load_gpus(path: Path = TABLE) -> dict[str, Gpu]:
    try:
        table = yaml.safe_load(path.read_text())
        return {key: _gpu(key, entry) for key, entry in table["gpus"].items()}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} cannot be read as a table of cards: {error!r}") from None


def _gpu(key: str, entry: dict[str, Any]) -> Gpu:
    return Gpu(
        key=key,
        name=str(entry["name"]),
        sm=positive_int(entry["sm"], f"{key}: sm"),
        memory_mib=positive_int(entry["memory_mib"], f"{key}: memory_mib"),
        engine_total_bytes=round(positive_float(entry["engine_total_gib"], f"{key}: engine_total_gib") * GIB),
        total_band=0.005 if entry["total_known"] else 0.01,
        bandwidth_gb_s=positive_int(entry["bandwidth_gb_s"], f"{key}: bandwidth_gb_s"),
    )


def find_gpu(wanted: str, gpus: dict[str, Gpu]) -> Gpu:
    """Takes `rtx4090`, `RTX 4090`, `4090` and `NVIDIA GeForce RTX 4090` alike; lists near names otherwise."""
    short = {_squeeze(gpu.key): gpu for gpu in gpus.values()}
    short |= {_squeeze(gpu.name): gpu for gpu in gpus.values()}
    asked = _squeeze(wanted)
    if asked in short:
        return short[asked]
    near = difflib.get_close_matches(asked, [_squeeze(key) for key in gpus], n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(short[name].key for name in near)}? " if near else ""
    raise PlanError(f"no card called {wanted!r}: {hint}known: {', '.join(gpus)}, cpu")


def _squeeze(name: str) -> str:
    kept = "".join(c for c in name.lower() if c.isalnum())
    for word in ("nvidia", "geforce", "rtx", "tesla"):
        kept = kept.removeprefix(word)
    return kept
