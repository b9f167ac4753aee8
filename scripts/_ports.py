"""Which ports are free, and who holds those that are not."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterable

import psutil

HOST = "127.0.0.1"


def port(text: str) -> int:
    """For argparse. Raises ArgumentTypeError where it is none."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: expected 1 to 65535")
    return int(text)


def is_free(port: int) -> bool:
    """Whether a server could listen there now (TIME_WAIT does not count, as for servers)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port nobody listens on now; the kernel hands it out again only much later."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def free_above(ports: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """For each of `ports` the next free one above it, none twice and none of `wanted`."""
    spoken_for, found = set(wanted), []
    for port in ports:
        other = next((p for p in range(port + 1, 65536) if p not in spoken_for and is_free(p)), None) or free_port()
        spoken_for.add(other)
        found.append(other)
    return found


def holder(port: int) -> str:
    """Who listens on the port: "NAME (pid N)", or "another process" where the system does not say."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return "another process"
