"""A recorded card, served as the DCGM exporter would: so that GPU panels can be drawn where there is none."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripts import _ports

FILE = Path(__file__).parent / "data" / "gpu.json"


def page(recording: dict[str, Any], seconds: float) -> str:
    """The exposition text so many seconds into the recording; it begins again at its end, its counters go on."""
    rows = recording["rows"]
    rounds, index = divmod(int(seconds / recording["every_s"]), len(rows))
    labels = f'gpu="0",UUID="GPU-recorded",device="nvidia0",modelName="{recording["card"]}"'
    lines = []
    for column, name in enumerate(recording["fields"]):
        value, kind = rows[index][column], "gauge"
        if name.endswith("_CONSUMPTION"):
            kind = "counter"
            per_row = (rows[-1][column] - rows[0][column]) / (len(rows) - 1)
            value += rounds * per_row * len(rows)
        lines.append(f"# TYPE {name} {kind}\n{name}{{{labels}}} {value}\n")
    return "".join(lines)


@contextlib.contextmanager
def exporter(file: Path = FILE) -> Iterator[tuple[str, str]]:
    """Serves the recording from now on; yields the card's name and host:port."""
    recording = json.loads(file.read_text(encoding="utf-8"))
    began = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(recording, time.monotonic() - began).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a scrape that timed out is counted by who scraped
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            pass

    with ThreadingHTTPServer((_ports.HOST, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield recording["card"], f"{_ports.HOST}:{server.server_address[1]}"
        server.shutdown()
