"""What may be promoted, what a revert goes back to, and the change of links for both. No engine is touched here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.model_fetch_store import whole
from scripts.quantization import QuantizeError
from scripts.quantization.manifest import Manifest, damage, read
from scripts.quantization.store import CURRENT, PREVIOUS, Version, point, target, versions


@dataclass(frozen=True)
class Move:
    """`current` goes from `now` to `to`, `previous` from `before` to `now`. apply and undo bear being repeated."""

    home: Path
    to: str
    now: str | None
    before: str | None

    def apply(self) -> None:
        """`previous` first: whoever is killed in between still has a way back. Raises OSError."""
        if self.now is not None and (self.home / self.now).is_dir():
            point(self.home, PREVIOUS, self.now)
        point(self.home, CURRENT, self.to)

    def undo(self) -> None:
        """Raises OSError."""
        point(self.home, CURRENT, self.now)
        point(self.home, PREVIOUS, self.before)

    @property
    def note(self) -> Mapping[str, str]:
        """All of it as text, for a journal."""
        return {"home": str(self.home), "to": self.to, "now": self.now or "", "before": self.before or ""}

    @classmethod
    def of(cls, note: Mapping[str, str]) -> Move:
        return cls(Path(note["home"]), note["to"], note["now"] or None, note["before"] or None)


def fingerprint(manifest: Manifest) -> str:
    """Of all file hashes: a gate's result holds for these bytes and no others."""
    text = json.dumps({name: file.sha256 for name, file in sorted(manifest.files.items())})
    return hashlib.sha256(text.encode()).hexdigest()


def choose(found: list[Version], wanted: str | None) -> Version:
    """The version meant by `wanted` (its beginning is enough), else the newest quantized one. Raises QuantizeError."""
    name = found[0].name if found else "the model"
    if wanted is None:
        quantized = [each for each in found if each.manifest is not None]
        if not quantized:
            raise QuantizeError(f"{name} has no quantized version: make quantize first")
        return quantized[-1]
    matching = [each for each in found if each.version.startswith(wanted)]
    if len(matching) != 1:
        there = ", ".join(each.version for each in found) or "none"
        raise QuantizeError(f"{'several versions begin' if matching else 'no version begins'} with {wanted}: {there}")
    return matching[0]


def promotable(version: Version) -> Manifest:
    """Its manifest, where the gate passed exactly these bytes and they are still there. Raises QuantizeError."""
    where = f"{version.name}/{version.version}"
    if version.problem:
        raise QuantizeError(version.problem)
    manifest = version.manifest
    if manifest is None:
        raise QuantizeError(f"{where} was fetched and not quantized, so no gate judged it: make model serves it")
    gate = manifest.gate
    if gate is None:
        raise QuantizeError(f"{where} was not judged yet: make gate NAME={version.name} DIGEST={version.version}")
    if gate.get("verdict") != "PASS":
        first = next(iter(gate.get("reasons", ())), "see its report")
        raise QuantizeError(f"{where} is not promoted: the gate says {gate.get('verdict')} ({first})")
    wrong = next(damage(version.path, manifest, hashes=True), None)
    if wrong is None and gate.get("files_sha256") != fingerprint(manifest):
        wrong = "its manifest lists other files than the gate judged"
    if wrong is not None:
        raise QuantizeError(
            f"{where} was changed after the gate: {wrong}; quantize it again, and nothing is promoted meanwhile"
        )
    return manifest


def plan_promotion(models: Path, name: str, wanted: str | None) -> Move | None:
    """None: it is what is served already. Raises QuantizeError. Reads every byte of the version."""
    found = versions(models, name)
    home = models / name
    chosen = choose(found, wanted)
    promotable(chosen)
    now, before = target(home, CURRENT), target(home, PREVIOUS)
    return None if now == chosen.version else Move(home, chosen.version, now, before)


def plan_revert(models: Path, name: str) -> Move:
    """Back to `previous`, whole. Raises QuantizeError."""
    versions(models, name)  # names what there is, where the name is wrong
    home = models / name
    now, before = target(home, CURRENT), target(home, PREVIOUS)
    if before is None or before == now:
        raise QuantizeError(f"nothing was served before {name}/{now}: there is no version to go back to")
    path = home / before
    if not path.is_dir():
        raise QuantizeError(f"{name}/{before}, which was served before, is gone from {home}")
    if (path / "manifest.json").is_file():
        wrong = next(damage(path, read(path), hashes=True), None)
    else:
        wrong = None if whole(path, hashes=True) else "it is not as it was fetched"
    if wrong is not None:
        raise QuantizeError(f"{name}/{before} can't be gone back to: {wrong}")
    return Move(home, before, now, before)
