"""Bad input: each mistake is one line, an exit code that is not 0, and no traceback."""

import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts import _ports, verify

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"
Serve = Callable[[dict[str, tuple[int, str]]], str]
OTHERS_PAGE = "# TYPE http_requests_total counter\nhttp_requests_total 1.0\n"


class Pages(http.server.BaseHTTPRequestHandler):
    """Answers GET by a table of path -> (status, body)."""

    table: dict[str, tuple[int, str]]

    def do_GET(self) -> None:
        status, body = self.table.get(self.path, (404, "not here"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a real server with the given pages; returns its address."""
    running = []

    def start(table: dict[str, tuple[int, str]]) -> str:
        handler = type("Handler", (Pages,), {"table": table})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs it, expects a refusal, and returns its one line."""
    assert verify.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("verify: ")
    return err


def test_an_engine_that_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no engine answers" in refused(capsys, f"http://127.0.0.1:{_ports.free_port()}")


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "http://[")


def test_another_server(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/health answered 404" in refused(capsys, serve({}))


@pytest.mark.parametrize(
    "pages",
    [
        {"/readyz": (200, '{"status": "ready"}')},
        {"/readyz": (503, '{"status": "unready", "reason": "x"}')},
        {"/metrics": (200, "# HELP gateway_build_info 1\ngateway_build_info 1.0\n")},
    ],
    ids=["its public address", "unready", "its admin address"],
)
def test_the_gateways_address(
    pages: dict[str, tuple[int, str]], serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve(pages)
    assert f"{url} is the gateway: name the engine's own address, make verify ENGINE=" in refused(capsys, url)


def test_a_dead_engine(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/health answered 503" in refused(capsys, serve({"/health": (503, "")}))


def test_the_metrics_page_of_another_server(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve({"/health": (200, ""), "/metrics": (200, OTHERS_PAGE)})
    said = refused(capsys, url)
    assert "not a vLLM engine's page" in said
    assert "--disable-log-stats" in said


def engine_pages() -> dict[str, tuple[int, str]]:
    metrics = (ENGINES / "recorded-0.32.0-cpu.metrics").read_text(encoding="utf-8")
    models = {"data": [{"id": "smollm2", "root": "/models/smollm2", "max_model_len": 2048}]}
    return {"/health": (200, ""), "/metrics": (200, metrics), "/v1/models": (200, json.dumps(models))}


def test_an_engine_that_wants_its_key(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    pages = engine_pages() | {"/v1/models": (401, "{}")}
    assert "VLLM_API_KEY" in refused(capsys, serve(pages))


def test_an_engine_that_refuses_requests(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert "/v1/completions answered 501" in refused(capsys, serve(engine_pages()))


@pytest.mark.parametrize("content", [None, "", "nothing of an engine\n"])
def test_a_log_that_is_none(
    content: str | None,
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "engine.log"
    if content is not None:
        path.write_text(content)
    assert str(path) in refused(capsys, serve(engine_pages()), "--log", str(path))


def test_a_process_that_is_not_there(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    gone = max(int(name) for name in os.listdir("/proc") if name.isdecimal()) + 100_000  # noqa: PTH208
    assert "there is no such process" in refused(capsys, serve(engine_pages()), "--pid", str(gone))


@pytest.mark.parametrize(
    "argv",
    [["--pairs", "0"], ["--pairs", "x"], ["--nonsense"], ["http://a", "b"], ["127.0.0.1:8000"], ["ftp://127.0.0.1"]],
)
def test_wrong_usage_is_argparses_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verify.main(argv)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("verify: ") and said.count("\n") == 1


# -- the log's own check ----------------------------------------------------------------------------------------------


def test_a_log_that_is_cut_off_is_said_and_proves_nothing(tmp_path: Path) -> None:
    whole = (ENGINES / "recorded-0.32.0-cpu.log").read_text(encoding="utf-8")
    path = tmp_path / "engine.log"
    path.write_text(whole[: whole.index("CPU KV cache size")])
    log, check = verify.read_log(str(path), None)
    assert log is not None
    assert (check.status, "before the size of the KV cache" in check.found) == ("warn", True)
    path.write_text(whole[: whole.index("(APIServer pid=15955) INFO 11-30 18:05:15")])
    _, check = verify.read_log(str(path), None)
    assert (check.status, "before the server came up" in check.found) == ("warn", True)


def test_the_log_of_another_process_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text((ENGINES / "recorded-0.32.0-cpu.log").read_text(encoding="utf-8"))
    _, check = verify.read_log(str(path), os.getpid())
    assert (check.status, "of process 15955" in check.found) == ("warn", True)


def test_a_log_that_says_prefix_caching_is_off_is_a_contradiction(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text((ENGINES / "derived-0.6.3-fp8kv.log").read_text(encoding="utf-8"))
    _, check = verify.read_log(str(path), None)
    assert check.status == "fail"


def test_without_a_log_it_says_how_to_give_one(tmp_path: Path) -> None:
    log, check = verify.read_log(None, None, tmp_path)
    assert (log, check.status) == (None, "skip")
    assert "--log" in check.found


def test_the_demos_log_is_found_by_the_process_it_names(tmp_path: Path) -> None:
    folder = tmp_path / ".demo" / "8080"
    folder.mkdir(parents=True)
    whole = (ENGINES / "recorded-0.32.0-cpu.log").read_text(encoding="utf-8")
    (folder / "engine.log").write_text(whole.replace("pid=15955", f"pid={os.getpid()}"))
    log, check = verify.read_log(None, os.getpid(), tmp_path)
    assert log is not None
    assert (check.status, log.tokens) == ("ok", 23296)
