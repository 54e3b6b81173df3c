"""Connections of controller and workers: :mod:`multiprocessing.connection` over TCP, with a key and bounded waits.

The controller listens on loopback unless it is told otherwise; who does not know the key of the run is turned away.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge

from rpeg_core.errors import BackendError

__all__ = ["Listener", "connect", "key_from_text", "parse_address"]

HANDSHAKE_S = 5.0
"""A caller that does not prove in this time that it knows the key is turned away."""

KEEPALIVE_S = 30
"""After so many idle seconds the operating system asks whether the other machine is still there."""

Address = tuple[str, int]


class Listener:
    """Accepts workers that know the key.

    Args:
        address: host and port; port 0 takes any that is free.
        key: of the run.
        send_limit_s: an accepted connection on which sending, or receiving the rest of a message, takes longer breaks.

    Raises:
        BackendError: the address cannot be listened on.
    """

    def __init__(self, address: Address, key: bytes, *, send_limit_s: float) -> None:
        self._key, self._limit_s = key, send_limit_s
        try:
            self._socket = socket.create_server(address)
        except OSError as error:
            host, port = address
            raise BackendError(
                f"cannot listen on {host}:{port}",
                facts=[error.strerror or str(error)],
                hint="set megatron.listen to an address of this machine and a free port, or port 0",
            ) from error
        self._socket.setblocking(False)

    @property
    def address(self) -> Address:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def fileno(self) -> int:
        """For selectors: readable when somebody calls."""
        return self._socket.fileno()

    def accept(self) -> Connection | None:
        """The next caller that knows the key; None when nobody calls, or the caller was turned away."""
        try:
            caller, _ = self._socket.accept()
        except BlockingIOError:
            return None
        caller.setblocking(True)
        _limit(caller, HANDSHAKE_S)
        connection = Connection(caller.detach())
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except (OSError, EOFError, multiprocessing.AuthenticationError):
            connection.close()
            return None
        _tune(connection, self._limit_s)
        return connection

    def close(self) -> None:
        """Nobody can call any more."""
        self._socket.close()


def connect(address: Address, key: bytes, *, patience_s: float) -> Connection:
    """Call the controller; it need not listen yet.

    Raises:
        BackendError: it did not answer within ``patience_s``, or has another key.
    """
    deadline = time.monotonic() + patience_s
    host, port = address
    while True:
        try:
            connection = Client(address, authkey=key)
            break
        except multiprocessing.AuthenticationError as error:
            raise BackendError(
                f"the controller at {host}:{port} has another key", hint="give both the same RPEG_AUTHKEY"
            ) from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise BackendError(f"the controller at {host}:{port} does not answer", facts=[str(error)]) from error
            time.sleep(0.1)
    _tune(connection, None)
    return connection


def parse_address(text: str, where: str) -> Address:
    """Read ``HOST:PORT``.

    Raises:
        BackendError: it has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BackendError(f"{where} is {text!r}", facts=["allowed: HOST:PORT, e.g. 127.0.0.1:0"])
    return host.strip("[]"), int(port)


def key_from_text(text: str, where: str) -> bytes:
    """Read a key.

    Raises:
        BackendError: it is too short to protect anything.
    """
    if len(text) < 16:
        raise BackendError(
            f"{where} has {len(text)} characters",
            facts=["allowed: at least 16, the same for the controller and all workers"],
            hint=f"export {where}=$(openssl rand -hex 32)",
        )
    return text.encode()


def _tune(connection: Connection, limit_s: float | None) -> None:
    """Small messages leave at once; a dead machine is noticed; with a limit, no read or write blocks for longer."""
    with _socket_of(connection) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", KEEPALIVE_S), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # not on every operating system
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        _limit(raw, 0.0 if limit_s is None else limit_s)


def _limit(raw: socket.socket, limit_s: float) -> None:
    """0 is no limit."""
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    raw = socket.socket(fileno=os.dup(connection.fileno()))
    try:
        yield raw
    finally:
        raw.close()
