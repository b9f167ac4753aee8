"""A backup as a file: what is in it, that one wrong byte is found, and that what is no backup is refused."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from scripts import _archive, restore
from scripts import backup as backup_script
from scripts._archive import ArchiveError, Writer, verify
from scripts.backup import settings_files

CONTENT = {"files/.env": b"A=1\n", "files/secrets/keys.json": b"{}", "volumes/prometheus-data/wal/0001": b"x" * 70000}


def backup(path: Path, content: dict[str, bytes] = CONTENT) -> Path:
    with path.open("wb") as file, Writer(file, {"made": "today"}) as archive:
        for name, data in content.items():
            archive.add(name, len(data), 0o640, io.BytesIO(data))
    return path


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    path = backup(tmp_path / "a.tar")
    manifest = verify(path)
    assert set(manifest["entries"]) == set(CONTENT)
    found = {member.name: source.read() for member, source in _archive.members(path, "volumes/prometheus-data/")}
    assert found == {"wal/0001": CONTENT["volumes/prometheus-data/wal/0001"]}


def test_one_wrong_byte_anywhere_is_found(tmp_path: Path) -> None:
    """Every 97th byte of it, each on its own: in contents, in headers, in the manifest."""
    good = backup(tmp_path / "a.tar", {"files/.env": b"A=1\n" * 30, "files/secrets/keys.json": b"{}"}).read_bytes()
    end = good.rindex(b"}") + 1  # what follows is padding
    path = tmp_path / "b.tar"
    passed = []
    for at in range(0, end, 97):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            verify(path)
        except ArchiveError:
            continue
        passed.append(at)
    padding = [at for at in passed if good[at] == 0]  # a zero byte between members means nothing to anybody
    assert passed == padding


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.88])
def test_a_copy_that_was_cut_off_is_refused(tmp_path: Path, keep: float) -> None:
    path = backup(tmp_path / "a.tar")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(ArchiveError, match="damaged"):
        verify(path)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "files/secrets/../../x", "volumes/other/x", "files/gateway/app.py", "x"]
)
def test_a_member_that_no_backup_has_is_refused(tmp_path: Path, name: str) -> None:
    path = backup(tmp_path / "a.tar", {"files/.env": b"", name: b"evil"})
    with pytest.raises(ArchiveError, match="is no backup of this stack: it holds"):
        verify(path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("files/.env")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ArchiveError):
        verify(path)


def test_another_projects_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    text = json.dumps({"format": "other 1", "entries": {}}).encode()
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text))
    with pytest.raises(ArchiveError, match="expected the format 'vllm-stack backup 1'"):
        verify(path)
    path.write_bytes(b"not a tar at all" * 100)
    with pytest.raises(ArchiveError, match="damaged, or no backup"):
        verify(path)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path) -> None:
    """A real limit on the file's size, in a process of its own."""
    source = (
        "import sys, pathlib; from scripts import backup\n"
        "from scripts._compose import Compose\n"
        "big = pathlib.Path(sys.argv[1]); plan = backup.Plan(big.parent / 'made/a.tar', {'.env': big}, [], [])\n"
        "try: backup.write(plan, Compose())\n"
        "except OSError as error: print(error.strerror)"
    )
    big = tmp_path / "big"
    big.write_bytes(os.urandom(1 << 20))
    done = subprocess.run(
        [sys.executable, "-c", source, str(big)], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )  # fmt: skip
    assert done.stdout.strip() == "File too large", done.stderr
    assert list((tmp_path / "made").iterdir()) == []


def test_settings_secrets_and_the_profile_in_use_are_kept_and_no_more(tmp_path: Path) -> None:
    for name in (".env", "configs/gateway.yaml", "configs/engine/mine.yaml", "configs/engine/other.yaml",
                 "configs/prometheus/prometheus.yml", "elsewhere/private/token", "elsewhere/.keys.json.lock",
                 "models/big"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    found = settings_files({"ENGINE_PROFILE": "mine", "SECRETS_DIR": "elsewhere"}, tmp_path)
    assert sorted(found) == [".env", "configs/engine/mine.yaml", "configs/gateway.yaml", "secrets/private/token"]


def test_what_files_replace_is_kept_and_private_stays_private(tmp_path: Path) -> None:
    content = {"files/.env": b"A=1\n", "files/secrets/private/token": b"t", "files/secrets/keys.json": b"{}"}
    path = backup(tmp_path / "a.tar", content)
    (tmp_path / ".env").write_text("A=0\n", encoding="utf-8")
    chosen = restore.plan(verify(path), {}, tmp_path)
    assert restore.in_the_way(chosen, []) == [".env"]
    restore.put_files(path, chosen, tmp_path / "aside")
    assert (tmp_path / ".env").read_text(encoding="utf-8") == "A=1\n"
    assert (tmp_path / "aside/.env").read_text(encoding="utf-8") == "A=0\n"
    assert (tmp_path / "secrets/private").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o711


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert restore.main(["/nowhere/a.tar"]) == 1
    assert capsys.readouterr().err == "restore: /nowhere/a.tar: No such file or directory\n"


def test_a_docker_that_does_not_answer_is_no_stack_without_volumes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A backup without its volumes would look whole."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    monkeypatch.setenv("ENGINE_PROFILE", "any")
    assert backup_script.main([str(tmp_path / "a.tar")]) == 1
    assert capsys.readouterr().err.startswith("backup: ")
    assert list(tmp_path.iterdir()) == []
