"""The gateway container's health: /healthz answers 200. Exit code 0 healthy, 1 not (one line says why).

Standard library alone, and run with -I -S: it runs every few seconds, beside the gateway's own work.
"""

import http.client
import os
import sys

TIMEOUT_S = 2.5  # below the health check's own timeout, so that the reason is ours


def check(listen: str) -> str | None:
    """What is wrong with the gateway that listens there; None if nothing is."""
    port = int(listen.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"/healthz on port {port}: {type(error).__name__}"
    finally:
        connection.close()
    return None if status == 200 else f"/healthz on port {port}: HTTP {status}"


if __name__ == "__main__":
    wrong = check(os.environ.get("GATEWAY__LISTEN", "0.0.0.0:8080"))
    print(wrong or "ok")
    sys.exit(1 if wrong else 0)
