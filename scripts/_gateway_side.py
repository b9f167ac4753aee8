"""Runs inside the gateway's container: one request from there, printed as JSON. Standard library alone.

    python -c SOURCE '{"to": "engine", "method": "GET", "path": "/v1/models", "body": null, "timeout_s": 10}'

`to` is `engine` or `admin` (the gateway's own admin port). The keys are the container's secrets and stay there.
Prints {"status": 200, "text": "..."}; status 0 where nobody answered, the text then says why. Exit code 0 either way.
"""

import http.client
import json
import os
import sys
import urllib.parse
from pathlib import Path
from typing import Any

MAX_BYTES = 8_000_000


def where(to: str, env: dict[str, str]) -> tuple[str, int, str]:
    """Host, port and the file with the key."""
    if to == "admin":
        port = int(env.get("GATEWAY__ADMIN_LISTEN", "0.0.0.0:9000").rpartition(":")[2])
        return "127.0.0.1", port, env.get("GATEWAY__AUTH__ADMIN_TOKEN_FILE", "")
    url = urllib.parse.urlsplit(json.loads(env["GATEWAY__ENGINES"])[0])
    return url.hostname or "", url.port or 80, env.get("GATEWAY__ENGINE__API_KEY_FILE", "")


def ask(order: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """One request and its answer; never raises for what the other side does."""
    host, port, key_file = where(order["to"], env)
    headers = {"Content-Type": "application/json"}
    if key_file:
        headers["Authorization"] = f"Bearer {Path(key_file).read_text(encoding='ascii').strip()}"
    connection = http.client.HTTPConnection(host, port, timeout=order["timeout_s"])
    try:
        body = None if order["body"] is None else json.dumps(order["body"])
        connection.request(order["method"], order["path"], body, headers)
        answer = connection.getresponse()
        return {"status": answer.status, "text": answer.read(MAX_BYTES).decode("utf-8", "replace")}
    except (OSError, http.client.HTTPException) as error:
        return {"status": 0, "text": f"{type(error).__name__}: {error}"}
    finally:
        connection.close()


if __name__ == "__main__":
    print(json.dumps(ask(json.loads(sys.argv[1]), dict(os.environ))))
