"""`make keys`: what each command leaves in the file, and that the key itself is shown once and kept nowhere."""

import datetime
import hashlib
import json
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import Key, Keyring, Tenant, parse_keys
from scripts import keys

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secrets" / "keys.json"


def command(file: Path, *words: str) -> int:
    return keys.main([*words, "--file", str(file)])


def entries(file: Path) -> tuple[Key, ...]:
    return parse_keys(file.read_bytes(), str(file)).keys


def tenant(file: Path, secret: str, at: datetime.datetime | None = None) -> Tenant | None:
    return Keyring(entries(file)).lookup(secret.encode(), at)


def test_add_prints_the_key_alone_on_stdout_and_keeps_only_its_digest(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(file, "add", "app1", "--group", "g", "--concurrent", "3") == 0
    out, err = capsys.readouterr()
    secret = out.removesuffix("\n")
    assert secret.startswith("sk-")
    assert len(secret) >= 43
    assert "\n" not in secret
    assert secret not in err
    assert secret not in file.read_text()
    assert entries(file)[0].sha256 == hashlib.sha256(secret.encode()).hexdigest()
    found = tenant(file, secret)
    assert found is not None
    assert (found.name, found.group, found.concurrent) == ("app1", "g", 3)


def test_two_keys_never_look_alike(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        command(file, "add", f"app{number}")
    assert len(set(capsys.readouterr().out.split())) == 20


def test_json_reports_the_key_once_and_list_never(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(file, "add", "app1", "--json")
    report = json.loads(capsys.readouterr().out)
    assert tenant(file, report["key"]) is not None
    command(file, "list", "--json")
    listed = capsys.readouterr().out
    assert report["key"] not in listed
    assert entries(file)[0].sha256 not in listed
    assert json.loads(listed)["keys"][0]["id"] == report["keys"][0]["id"]
    command(file, "list")
    shown = capsys.readouterr().out
    assert "app1" in shown
    assert report["key"] not in shown


def test_a_name_that_exists_is_refused_and_one_that_has_expired_is_free_again(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(file, "add", "app1")
    before = file.read_bytes()
    assert command(file, "add", "app1") == 1
    assert "exists" in capsys.readouterr().err
    assert file.read_bytes() == before
    command(file, "expire", "app1", "--when", "0s")
    assert command(file, "add", "app1") == 0
    assert len(entries(file)) == 1


def test_rotate_gives_the_same_rights_and_lets_the_old_key_live_for_the_grace_period(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(file, "add", "app1", "--requests-per-minute", "7", "--prompt-tokens-details")
    command(file, "rotate", "app1", "--grace", "2h")
    old, new = capsys.readouterr().out.split()
    for secret in (old, new):
        found = tenant(file, secret)
        assert found is not None
        assert (found.name, found.requests_per_minute, found.prompt_tokens_details) == ("app1", 7, True)
    later = NOW + datetime.timedelta(hours=3)
    assert tenant(file, old, later) is None
    assert tenant(file, new, later) is not None


def test_rotating_again_never_lengthens_an_old_keys_life(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(file, "add", "app1")
    command(file, "rotate", "app1", "--grace", "1h")
    command(file, "rotate", "app1", "--grace", "7d")
    first, second, third = capsys.readouterr().out.split()
    tomorrow = NOW + datetime.timedelta(days=1)
    assert [tenant(file, secret, tomorrow) is not None for secret in (first, second, third)] == [False, True, True]


def test_revoke_ends_all_of_a_names_keys_or_one_of_them(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(file, "add", "app1")
    command(file, "add", "app2")
    command(file, "rotate", "app1")
    first, other, second = capsys.readouterr().out.split()
    leaked = entries(file)[0].sha256[: keys.ID_DIGITS]
    assert command(file, "revoke", "app1", "--id", leaked) == 0
    assert tenant(file, first) is None
    assert tenant(file, second) is not None
    assert command(file, "revoke", "app1") == 0
    assert tenant(file, second) is None
    assert tenant(file, other) is not None
    assert command(file, "revoke", "app2") == 0
    assert entries(file) == ()


def test_expire_sets_and_lifts_the_end(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(file, "add", "app1", "--expires", "90d")
    secret = capsys.readouterr().out.strip()
    assert tenant(file, secret, NOW + datetime.timedelta(days=91)) is None
    command(file, "expire", "app1", "--when", "never")
    assert tenant(file, secret, NOW + datetime.timedelta(days=91)) is not None
    command(file, "expire", "app1", "--when", "2020-01-01T00:00:00+00:00")
    assert tenant(file, secret) is None


@pytest.mark.parametrize(
    "words",
    [
        ("add", "two words"),
        ("add", ""),
        ("add", "anonymous"),
        ("add", "other"),
        ("add", "../x"),
        ("add", "a", "--weight", "0"),
        ("add", "a", "--weight", "nan"),
        ("add", "a", "--concurrent", "0"),
        ("add", "a", "--group", "two words"),
        ("add", "a", "--priority", "99999"),
        ("rotate", "nobody"),
        ("revoke", "nobody"),
        ("revoke", "app1", "--id", "000000000000"),
        ("expire", "nobody", "--when", "1d"),
    ],
)
def test_what_can_not_be_done_is_one_line_and_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    command(file, "add", "app1")
    before = file.read_bytes()
    capsys.readouterr()
    assert command(file, *words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("keys: ")
    assert err.count("\n") == 1
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "words", [("add",), ("make", "x"), ("expire", "a", "--when", "5x"), ("rotate", "a", "--grace", "-1d"), ()]
)
def test_wrong_usage_exits_2(file: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        command(file, *words)
    assert left.value.code == 2
    assert not file.exists()


def test_a_file_that_is_not_ours_is_left_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.parent.mkdir()
    file.write_text("not JSON")
    assert command(file, "add", "app1") == 1
    assert file.read_text() == "not JSON"
    assert capsys.readouterr().out == ""


def test_a_dry_run_makes_no_key_and_touches_nothing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(file, "add", "app1", "--dry-run") == 0
    assert not file.parent.exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert "would have added app1" in err


def test_the_gateways_user_can_read_the_file_and_a_mode_once_set_is_kept(file: Path) -> None:
    old_mask = os.umask(0o077)
    try:
        command(file, "add", "app1")
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        file.chmod(0o640)
        command(file, "add", "app2")
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
    finally:
        os.umask(old_mask)


def test_an_owner_is_kept_where_we_may_set_it(file: Path) -> None:
    command(file, "add", "app1")
    if os.geteuid() != 0:
        return
    os.chown(file, 10001, 10001)
    command(file, "add", "app2")
    assert (file.stat().st_uid, file.stat().st_gid) == (10001, 10001)


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    command(file, "add", "app1")
    link = tmp_path / "keys.json"
    link.symlink_to(file)
    assert command(link, "add", "app2") == 0
    assert link.is_symlink()
    assert len(entries(file)) == 2


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(file, "add", "app1")
    before = file.read_bytes()
    capsys.readouterr()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert command(file, "add", "app2") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "No space left on device" in err
    assert file.read_bytes() == before
    assert {path.name for path in file.parent.iterdir()} == {"keys.json", ".keys.json.lock"}


def _add_some(path: str, worker: int) -> None:
    for number in range(10):
        keys.main(["add", f"app{worker}-{number}", "--file", path])


def test_writers_at_the_same_time_lose_nothing_and_a_reader_always_sees_a_whole_file(file: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers: list[Any] = [context.Process(target=_add_some, args=(str(file), number)) for number in range(3)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        if file.exists():
            entries(file)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(entries(file)) == 30
