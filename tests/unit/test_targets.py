"""Lists of engines as Prometheus reads them: what is taken from one, and what is said of a bad one."""

from pathlib import Path

import pytest

from gateway.settings import Settings
from gateway.targets import MAX_BYTES, TargetsError, parse_targets, read_targets


def parse(text: str, *, as_json: bool = True) -> tuple[str, ...]:
    return parse_targets(text.encode(), "file", as_json=as_json)


def test_targets_become_base_urls_once_each_and_in_order() -> None:
    text = """[{"targets": ["b:8000", "a:8000"]}, {"targets": ["a:8000", "[::1]:9", "10.0.0.1:80"]}]"""
    assert parse(text) == ("http://b:8000", "http://a:8000", "http://[::1]:9", "http://10.0.0.1:80")


def test_spellings_of_one_address_are_one_engine() -> None:
    text = '[{"targets": ["engine:8000", "Engine:8000", "ENGINE:08000", "[::A]:1", "[::a]:1"]}]'
    assert parse(text) == ("http://engine:8000", "http://[::a]:1")
    settings = Settings(engines=("HTTP://Engine/", "http://[::A]"), auth={"disabled": True})
    assert settings.engines == ("http://engine", "http://[::a]")


def test_the_same_as_yaml() -> None:
    text = "- targets: [b:8000, a:8000]\n  labels:\n    model: x\n- targets:\n  - c:1\n"
    assert parse(text, as_json=False) == ("http://b:8000", "http://a:8000", "http://c:1")


def test_the_scheme_label_is_used_and_the_others_are_not() -> None:
    labels = '{"__scheme__": "https", "__address__": "x:1", "__metrics_path__": "/m", "model": "m", "zone": "z"}'
    assert parse(f'[{{"targets": ["a:443"], "labels": {labels}}}]') == ("https://a:443",)
    assert parse('[{"targets": ["a:443"], "labels": null}]') == ("http://a:443",)


def test_an_empty_list_means_no_engines() -> None:
    assert parse("[]") == ()
    assert parse('[{"targets": []}]') == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: expected JSON"),
        ('[\n{"targets": ["a:1"]},\n{"targets": [}\n]', "line 3: expected JSON"),
        ("null", "expected a list"),
        ('{"targets": ["a:1"]}', "found dict"),
        ('[{"targets": ["a:1"]}, 5]', "[1]: expected {"),
        ('[{"labels": {}}]', "[0]: expected {"),
        ('[{"targets": "a:1"}]', "[0]: expected {"),
        ('[{"targets": ["a:1"], "label": {}}]', "[0].label: expected only"),
        ('[{"targets": ["a:1"], "labels": []}]', ""),
        ('[{"targets": ["a:1"], "labels": ["x"]}]', "[0].labels: expected names"),
        ('[{"targets": ["a:1"], "labels": {"__scheme__": "ftp"}}]', "[0].labels.__scheme__: expected http or https"),
        ('[{"targets": ["a:1", "b"]}]', "[0].targets[1]: expected host:port"),
        ('[{"targets": ["a:1", 8000]}]', "[0].targets[1]: expected host:port"),
        ('[{"targets": ["http://a:1"]}]', "[0].targets[0]: expected host:port"),
        ('[{"targets": ["a:1/v1"]}]', "[0].targets[0]: expected host:port"),
        ('[{"targets": ["a:0"]}]', "[0].targets[0]: expected host:port"),
        ('[{"targets": ["a:65536"]}]', "[0].targets[0]: expected host:port"),
        ('[{"targets": [":80"]}]', "[0].targets[0]: expected host:port"),
        ('[{"targets": ["user:canary@a:80"]}]', "[0].targets[0]: expected host:port"),
        ('[{"targets": ["a b:80"]}]', "[0].targets[0]: expected host:port"),
    ],
)
def test_a_bad_list_is_refused_with_line_or_field_on_one_line(text: str, told: str) -> None:
    if not told:
        assert parse(text) == ("http://a:1",)  # Prometheus writes no labels like this, too
        return
    with pytest.raises(TargetsError) as refused:
        parse(text)
    assert told in str(refused.value)
    assert str(refused.value).startswith("file: ")
    assert "\n" not in str(refused.value)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- targets: [a:1]\n- targets: [b:1\n", "line 3: expected YAML"),
        ("- targets: [a:1]\n  targets: b: c\n", "line 2: expected YAML"),
        ("- targets: !!python/object:os.system [a]\n", "line 1: expected YAML"),
        ("", "found nothing"),
        ("a:1", "found str"),
        ("\x00", "expected YAML"),
        ("[" * 5000, "expected YAML"),
        ("- targets: [a:1]\n  labels: {x: 2001-13-45}\n", ""),
    ],
)
def test_a_bad_yaml_list_likewise(text: str, told: str) -> None:
    with pytest.raises(TargetsError) as refused:
        parse(text, as_json=False)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_is_read_by_the_ending_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"targets": ["a:1"]}]')
    (tmp_path / "a.yml").write_text("- targets: [a:1]\n")
    assert read_targets(tmp_path / "a.json") == read_targets(tmp_path / "a.yml") == ("http://a:1",)


def test_a_file_that_cant_be_read_is_told_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(TargetsError, match=r"a\.json: No such file or directory"):
        read_targets(tmp_path / "a.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(TargetsError, match="no regular file"):
        read_targets(tmp_path / "folder.json")
    (tmp_path / "large.json").write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(TargetsError, match="more than"):
        read_targets(tmp_path / "large.json")
