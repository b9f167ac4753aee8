"""Who a request is from: headers, files with secrets, and the keys file as it changes."""

import asyncio
import datetime
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import AdminToken, Authenticator, read_secret
from gateway.errors import UnauthorizedError
from gateway.keys import ANONYMOUS, Keyring, KeysFileError, parse_keys, read_keyring
from gateway.metrics import Metrics
from gateway.settings import Auth, SettingsError

KEY = b"sk-canary"


def entry(name: str = "app1", key: bytes = KEY, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(key).hexdigest(), **fields}


def document(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"keys": list(entries)}).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys.json"
    file.write_bytes(document(entry()))
    return file


@pytest.fixture
def authenticator(path: Path) -> Authenticator:
    return Authenticator(Auth(keys_file=path), Metrics())


def asked(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"headers": list(headers)}


@pytest.mark.parametrize(
    "value",
    [b"Bearer sk-canary", b"bearer sk-canary", b"BEARER sk-canary", b"Bearer   sk-canary", b"Bearer sk-canary  "],
)
def test_the_scheme_is_case_insensitive_and_spaces_around_the_key_are_none_of_it(
    authenticator: Authenticator, value: bytes
) -> None:
    assert authenticator.authenticate(asked((b"authorization", value))).name == "app1"


def test_anthropics_header_is_taken_as_well(authenticator: Authenticator) -> None:
    assert authenticator.authenticate(asked((b"x-api-key", KEY))).name == "app1"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"sk-canary")],
        [(b"authorization", b"Basic sk-canary")],
        [(b"authorization", b"Basic c2stY2FuYXJ5")],
        [(b"authorization", b"Bearer\tsk-canary")],
        [(b"authorization", b"Bearer sk-canary,Bearer sk-canary")],
        [(b"authorization", b"Bearer sk-canary x")],
        [(b"authorization", b"Bearer sk-Canary")],
        [(b"authorization", b"Bearer sk-canar")],
        [(b"authorization", b"Bearer sk-canaryy")],
        [(b"authorization", "Bearer schlüssel".encode())],
        [(b"authorization", b"Bearer \xff\xfe\x00")],
        [(b"authorization", b"Bearer " + b"x" * 60_000)],
        [(b"authorization", b"Bearer " + hashlib.sha256(KEY).hexdigest().encode())],
        [(b"authorization", b"Bearer sk-canary"), (b"authorization", b"Bearer sk-canary")],
        [(b"authorization", b"Bearer sk-canary"), (b"authorization", b"Bearer other")],
        [(b"authorization", b"Bearer sk-canary"), (b"x-api-key", KEY)],
        [(b"x-api-key", b"")],
        [(b"x-api-key", KEY), (b"x-api-key", KEY)],
        [(b"api-key", KEY)],
        [(b"proxy-authorization", b"Bearer sk-canary")],
        [(b"cookie", b"authorization=Bearer sk-canary")],
    ],
)
def test_anything_else_is_unauthorized_and_never_an_error(
    authenticator: Authenticator, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(UnauthorizedError) as refused:
        authenticator.authenticate(asked(*headers))
    assert "canary" not in refused.value.message


def test_with_auth_disabled_everybody_is_anonymous() -> None:
    assert Authenticator(Auth(disabled=True), Metrics()).authenticate(asked()) == ANONYMOUS


def test_a_keys_expiry_counts_from_its_very_moment() -> None:
    moment = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
    keyring = Keyring(parse_keys(document(entry(expires=moment.isoformat())), "x").keys)
    assert keyring.lookup(KEY, moment - datetime.timedelta(microseconds=1)) is not None
    assert keyring.lookup(KEY, moment) is None


def test_two_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keyring = Keyring(parse_keys(document(entry(), entry(key=b"second")), "x").keys)
    assert keyring.lookup(KEY) == keyring.lookup(b"second") is not None


def test_all_of_an_entry_reaches_the_tenant() -> None:
    fields = {
        "group": "g",
        "priority": -3,
        "weight": 2.5,
        "requests_per_minute": 4,
        "tokens_per_minute": 5,
        "concurrent": 6,
        "prompt_tokens_details": True,
    }
    tenant = Keyring(parse_keys(document(entry(**fields)), "x").keys).lookup(KEY)
    assert tenant is not None
    assert {name: getattr(tenant, name) for name in fields} == fields


BAD_FILES = {
    "empty": b"",
    "blank": b" \r\n",
    "half": document(entry())[:40],
    "no object": b"[]",
    "null": b"null",
    "no keys": b"{}",
    "keys as object": b'{"keys": {"sk-canary": 1}}',
    "a key in the open": b'{"sk-canary": "app1"}',
    "plain key": b'{"keys": [{"name": "a", "key": "sk-canary"}]}',
    "key as name": json.dumps({"keys": [{"name": "sk-canary with blanks", "sha256": "0" * 64}]}).encode(),
    "short digest": b'{"keys": [{"name": "a", "sha256": "sk-canary"}]}',
    "upper digest": json.dumps({"keys": [{"name": "a", "sha256": "A" * 64}]}).encode(),
    "no zone": document(entry(expires="2030-01-01T00:00:00")),
    "not a date": document(entry(expires="sk-canary")),
    "twice": document(entry(), entry("app2")),
    "reserved name": document(entry("anonymous")),
    "zero limit": document(entry(concurrent=0)),
    "unknown field": document(entry(sk_canary=1)),
    "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_keys_file_stops_the_start_in_one_line_that_quotes_nothing_of_it(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        Authenticator(Auth(keys_file=path), Metrics())
    message = str(refused.value)
    assert message.startswith(f"auth.keys_file = {str(path)!r}: ")
    assert "\n" not in message
    assert "canary" not in message.replace(str(path), "")


@pytest.mark.parametrize("content", [b'{"keys": []}'])
def test_a_keys_file_without_a_key_stops_the_start(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="holds no key; expected at least one"):
        Authenticator(Auth(keys_file=path), Metrics())


@pytest.mark.parametrize("make", [lambda path: path.unlink(), lambda path: (path.unlink(), path.mkdir())])
def test_a_keys_file_that_can_not_be_read_stops_the_start(path: Path, make: Any) -> None:
    make(path)
    with pytest.raises(SettingsError, match=r"auth\.keys_file = .*make keys NAME=app1"):
        Authenticator(Auth(keys_file=path), Metrics())


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b" \r\n\r\n"])
def test_line_ends_of_editors_do_no_harm(path: Path, ending: bytes) -> None:
    path.write_bytes(document(entry()).replace(b", ", b"," + ending) + ending)
    assert read_keyring(path).lookup(KEY) is not None


def replace(path: Path, content: bytes) -> None:
    """As `make keys` does: the reader sees the old file or the new."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def accepted(authenticator: Authenticator, key: bytes = KEY) -> bool:
    try:
        authenticator.authenticate(asked((b"x-api-key", key)))
    except UnauthorizedError:
        return False
    return True


def test_a_changed_file_is_taken_over_whole(path: Path, authenticator: Authenticator) -> None:
    replace(path, document(entry(key=b"new")))
    authenticator.reload_if_changed()
    assert accepted(authenticator, b"new")
    assert not accepted(authenticator)


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_file_that_turns_bad_keeps_the_old_keys_says_so_in_a_metric_and_is_forgiven_when_mended(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    authenticator = Authenticator(Auth(keys_file=path), metrics)
    path.write_bytes(content)  # in place, as an editor or a full disk would leave it
    authenticator.reload_if_changed()
    assert accepted(authenticator)
    assert metrics.registry.get_sample_value("gateway_keys_file_bad") == 1
    assert metrics.registry.get_sample_value("gateway_keys_reload_failures_total") == 1
    assert "canary" not in "".join(str(record.__dict__.get("fields")) for record in caplog.records).replace(
        str(path), ""
    )
    authenticator.reload_if_changed()  # the same bad file is one failure
    assert metrics.registry.get_sample_value("gateway_keys_reload_failures_total") == 1
    replace(path, document(entry(key=b"new")))
    authenticator.reload_if_changed()
    assert metrics.registry.get_sample_value("gateway_keys_file_bad") == 0
    assert accepted(authenticator, b"new")


def test_a_file_that_vanishes_keeps_the_old_keys(path: Path, authenticator: Authenticator) -> None:
    path.unlink()
    authenticator.reload_if_changed()
    assert accepted(authenticator)


def test_revoking_the_last_key_counts_though_the_file_holds_none_then(path: Path) -> None:
    metrics = Metrics()
    authenticator = Authenticator(Auth(keys_file=path), metrics)
    replace(path, b'{"keys": []}')
    authenticator.reload_if_changed()
    assert not accepted(authenticator)
    assert metrics.registry.get_sample_value("gateway_keys") == 0


def test_a_file_written_byte_by_byte_never_locks_anybody_out(path: Path, authenticator: Authenticator) -> None:
    content = document(entry(), entry("app2", b"second"))
    for length in range(0, len(content) + 1, 7):
        path.write_bytes(content[:length])
        authenticator.reload_if_changed()
        assert accepted(authenticator), length
    path.write_bytes(content)
    authenticator.reload_if_changed()
    assert accepted(authenticator, b"second")


def test_an_older_file_put_back_is_noticed_though_it_has_an_old_time(path: Path, authenticator: Authenticator) -> None:
    old = path.read_bytes()
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    replace(path, document(entry(key=b"new")))
    authenticator.reload_if_changed()
    replace(path, old)
    os.utime(path, ns=times)
    authenticator.reload_if_changed()
    assert accepted(authenticator)


async def test_following_the_file_survives_a_bug(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    authenticator = Authenticator(Auth(keys_file=path, reload_s=0.01), metrics)
    follower = asyncio.create_task(authenticator.follow_file())
    with monkeypatch.context() as patch:
        patch.setattr("gateway.auth.read_keyring", lambda path: 1 / 0)
        replace(path, document(entry(key=b"new")))
        async with asyncio.timeout(5):
            while metrics.registry.get_sample_value("gateway_keys_file_bad") != 1:
                await asyncio.sleep(0.01)
    replace(path, document(entry(key=b"newer")))
    async with asyncio.timeout(5):
        while not accepted(authenticator, b"newer"):
            await asyncio.sleep(0.01)
    follower.cancel()


@pytest.mark.parametrize("content", [b"", b"\n", b"two words\n", b"two\nlines\n", "schlüssel".encode(), b"x\x00y"])
def test_a_file_that_holds_no_secret_is_refused_by_its_settings_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(SettingsError, match=r"engine\.api_key_file = .*: expected one secret") as refused:
        read_secret(tmp_path / "secret", "engine.api_key_file")
    assert content.strip() == b"" or content.strip().decode() not in str(refused.value)


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"  \n\n"])
def test_line_ends_after_a_secret_are_none_of_it(tmp_path: Path, ending: bytes) -> None:
    (tmp_path / "secret").write_bytes(b"internal" + ending)
    assert read_secret(tmp_path / "secret", "x") == "internal"


def test_the_admin_token_fails_closed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert not AdminToken(None).allows(asked())
    assert not AdminToken(None).allows(asked((b"authorization", b"Bearer ")))
    file.write_text("too-short\n")
    with pytest.raises(SettingsError, match=r"auth\.admin_token_file.*at least 16"):
        AdminToken(file)
    with pytest.raises(SettingsError, match=r"auth\.admin_token_file.*No such file"):
        AdminToken(tmp_path / "missing")
    file.write_text("an-admin-token-of-some-length\n")
    token = AdminToken(file)
    assert token.allows(asked((b"authorization", b"Bearer an-admin-token-of-some-length")))
    for value in (b"", b"Bearer ", b"Bearer an-admin-token-of-some-lengt", "Bearer ä".encode(), b"Basic x"):
        assert not token.allows(asked((b"authorization", value)))


def test_no_secret_stands_in_a_repr(path: Path, authenticator: Authenticator) -> None:
    assert "canary" not in repr(authenticator) + repr(read_keyring(path)) + repr(KeysFileError("x"))
