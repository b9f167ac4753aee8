"""What lies in a model directory: config.json and the headers of its safetensors files.

A safetensors file is 8 bytes (little-endian length of the header), the header (JSON: tensor -> dtype, shape,
data_offsets) and the data. Only headers are read, so a 16 GB checkpoint is checked in milliseconds.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.planner import PlanError
from scripts.planner.model import Model, dtype_bytes

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # the format's own limit
_FLOATS = {"F32", "F16", "BF16"}


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes in the file


@dataclass(frozen=True)
class Checkpoint:
    tensors: Mapping[str, Tensor]
    files: int

    def loaded_bytes(self, model: Model) -> int:
        """Bytes on the card: floats are cast to the model's dtype, scales kept; a tied head is held once."""
        return sum(self._loaded(name, tensor, model) for name, tensor in self.tensors.items())

    @staticmethod
    def _loaded(name: str, tensor: Tensor, model: Model) -> int:
        if name.endswith("rotary_emb.inv_freq") or (model.tied and name == "lm_head.weight"):
            return 0
        if tensor.dtype not in _FLOATS or "scale" in name.rsplit(".", 1)[-1]:
            return tensor.size
        return math.prod(tensor.shape) * dtype_bytes(model.dtype)


def read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise PlanError(f"{path} does not exist: {directory} is not a model directory")
    return read_json_object(path)


def read_checkpoint(directory: Path) -> Checkpoint | None:
    """The tensors of a directory; None when it holds no weights yet.

    Raises PlanError for a missing shard, a truncated file, or a tensor that the index promises and no shard holds.
    """
    index = directory / INDEX
    if index.is_file():
        listed = read_json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise PlanError(f"{index}: weight_map is missing or empty")
        return _sharded(directory, listed)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        if any(directory.glob("*.bin")) or any(directory.glob("*.gguf")):
            raise PlanError(f"{directory} holds no safetensors files; convert the weights, or plan by name instead")
        return None
    if len(files) > 1 and any("-of-" in path.name for path in files):
        raise PlanError(f"{index} does not exist, but the directory holds {len(files)} shards: download it again")
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= read_header(path)
    return Checkpoint(tensors, len(files))


def _sharded(directory: Path, weight_map: Mapping[str, str]) -> Checkpoint:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise PlanError(
            f"{directory}: {len(missing)} of {len(names)} shards are missing ({', '.join(missing[:3])}): "
            "download the model again"
        )
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read_header(directory / name)
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise PlanError(f"{directory}: {len(absent)} tensors of the index are in no shard ({absent[0]}, ...)")
    return Checkpoint(tensors, len(names))


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads one file's header and checks that its data is all there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise PlanError(f"{path} is not a whole safetensors file: {size} bytes, header of {length}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = {
            name: Tensor(
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
        end = max((int(e["data_offsets"][1]) for n, e in header.items() if n != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise PlanError(f"{path}: the safetensors header cannot be read; download the file again") from None
    expected = 8 + length + end
    if size != expected:
        raise PlanError(f"{path} is truncated: {size} bytes, its header promises {expected}; download it again")
    return tensors


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise PlanError(f"{path} should hold a JSON object")
    return found
