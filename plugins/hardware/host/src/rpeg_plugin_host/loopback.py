"""Measures messages between two processes over TCP on the loopback interface, the way gloo sends them.

:func:`measure_links` listens on 127.0.0.1 and starts ``python -m rpeg_plugin_host.loopback PORT`` as the other end,
which proves by a random key from its standard input that it is the one that was started.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import attrs

__all__ = ["Links", "main", "measure_links"]

KEY_BYTES = 16
SMALL_BYTES = 64
PINGS = 400
LARGE_BYTES = 16 * 2**20
ROUNDS = 6
TIMEOUT_S = 60.0


@attrs.frozen(kw_only=True)
class Links:
    """``T(M) = latency_s + M / bandwidth`` of one message, alone and while another goes the other way."""

    latency_s: float
    one_way_bytes_per_s: float
    both_ways_bytes_per_s: float


def measure_links(environment: Mapping[str, str]) -> Links:
    """Time messages to another process and back.

    Raises:
        OSError: the other process did not start or broke off.
    """
    key = secrets.token_bytes(KEY_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        port = str(server.getsockname()[1])
        command = [sys.executable, "-m", "rpeg_plugin_host.loopback", port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=dict(environment)) as other:
            try:
                assert other.stdin is not None
                other.stdin.write(key)
                other.stdin.close()
                with server.accept()[0] as connection:
                    _prepare(connection)
                    if not secrets.compare_digest(_receive(connection, KEY_BYTES), key):
                        raise ConnectionError("another process than the one that was started connected")
                    return _time(connection)
            finally:
                other.kill()


def _time(connection: socket.socket) -> Links:
    small, large = bytes(SMALL_BYTES), bytes(LARGE_BYTES)
    trips = []
    for _ in range(PINGS):
        start = time.perf_counter()
        connection.sendall(small)
        _receive(connection, SMALL_BYTES)
        trips.append(time.perf_counter() - start)
    latency_s = sorted(trips)[PINGS // 10] / 2  # like the best of the others: what disturbs a message delays it
    one_way, both_ways = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        connection.sendall(large)
        _receive(connection, 1)
        one_way.append(time.perf_counter() - start)
    for _ in range(ROUNDS):
        start = time.perf_counter()
        _exchange(connection, large)
        both_ways.append(time.perf_counter() - start)
    return Links(
        latency_s=latency_s,
        one_way_bytes_per_s=LARGE_BYTES / max(min(one_way) - 2 * latency_s, 1e-9),
        both_ways_bytes_per_s=LARGE_BYTES / max(min(both_ways) - latency_s, 1e-9),
    )


def _exchange(connection: socket.socket, payload: bytes) -> None:
    sender = threading.Thread(target=connection.sendall, args=(payload,))
    sender.start()
    _receive(connection, len(payload))
    sender.join()


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes; the last of them when they are many."""
    view = memoryview(bytearray(count))
    done = 0
    while done < count:
        got = connection.recv_into(view[done:])
        if got == 0:
            raise ConnectionError("the other process closed the connection")
        done += got
    return bytes(view[: min(count, KEY_BYTES)])


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main(port: int) -> None:
    """The other end."""
    key = sys.stdin.buffer.read(KEY_BYTES)
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        _prepare(connection)
        connection.sendall(key)
        for _ in range(PINGS):
            _receive(connection, SMALL_BYTES)
            connection.sendall(bytes(SMALL_BYTES))
        for _ in range(ROUNDS):
            _receive(connection, LARGE_BYTES)
            connection.sendall(b"\0")
        payload = bytes(LARGE_BYTES)
        for _ in range(ROUNDS):
            _exchange(connection, payload)


if __name__ == "__main__":
    main(int(sys.argv[1]))
