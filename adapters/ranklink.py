"""The links between the ranks of a trainer: every rank's beat keeps a TCP connection to rank 0's.

So the end of one rank's process is known at once, and by name, to the beat that holds the trainer's lease. Silence
proves nothing: only a word ("exited"), or a connection that was closed and does not come back, does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..engine.errors import ConfigError, Unavailable

__all__ = ["LinkClient", "LinkServer", "RankLink", "listen"]

_LINE_BYTES = 4096
_FIRST_LINE_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.2


class RankLink(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's beat finds rank 0's. `token` is a secret of this gang; all ranks bring the same.

    `join_seconds` bounds the first connection, `grace_seconds` the return of one that was lost.
    """

    host: str
    port: int
    token: str
    rank: int
    host_name: str = ""
    join_seconds: float = 60.0
    grace_seconds: float = 3.0


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    rank: int
    host_name: str = ""


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says at its end: `exited` with a reason, or goodbye."""

    kind: str
    reason: str = ""


@dataclass
class _Rank:
    host_name: str
    connections: int = 0
    ended: bool = False


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening socket for rank 0's beat, inherited by it; `getsockname()` has the port. Raises `ConfigError`."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(f"rank link: cannot listen on {host}:{port}: {error}") from error


def _lines(connection: socket.socket) -> Callable[[], bytes]:
    """A reader of whole lines; b"" at the end, `Unavailable` for a line that is too long."""
    rest = bytearray()

    def read() -> bytes:
        while b"\n" not in rest:
            if len(rest) > _LINE_BYTES:
                raise Unavailable("rank link: a line is too long")
            try:
                block = connection.recv(_LINE_BYTES)
            except TimeoutError:
                raise
            except OSError:
                block = b""  # a reset is an end
            if not block:
                return b""
            rest.extend(block)
        line, _, tail = bytes(rest).partition(b"\n")
        rest[:] = tail
        return line

    return read


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class LinkServer:
    """Rank 0's side, in its beat process: `on_gone(text)` is called once, in a thread, for the first rank that ended.

    Threads are daemons; `close` ends the listening.
    """

    def __init__(self, listener: socket.socket, link: RankLink, on_gone: Callable[[str], None]) -> None:
        self._listener = listener
        self._link = link
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="rank-link", daemon=True).start()

    def close(self, word: str = "goodbye", reason: str = "") -> None:
        """Tell every rank that rank 0 leaves (or "exited") and stop listening; idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            self._listener.close()
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            _say(connection, word, reason)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="rank-link", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_FIRST_LINE_SECONDS)
                _keep_alive(connection)
                read = _lines(connection)
                hello = msgspec.json.decode(read(), type=_Hello)
                if not hmac.compare_digest(hello.token.encode(), self._link.token.encode()):
                    return
                connection.sendall(b"{}\n")
                connection.settimeout(None)
                self._follow(connection, hello, read)
            except (OSError, msgspec.MsgspecError, Unavailable):
                return  # a stranger, or a rank that will connect again

    def _follow(self, connection: socket.socket, hello: _Hello, read: Callable[[], bytes]) -> None:
        with self._lock:
            rank = self._ranks.setdefault(hello.rank, _Rank(hello.host_name))
            rank.connections += 1
            self._open.add(connection)
        line = read()
        with self._lock:
            rank.connections -= 1
            self._open.discard(connection)
        who = f"rank {hello.rank} on host {hello.host_name or 'unknown'}"
        if line:
            rank.ended = True
            word = msgspec.json.decode(line, type=_Word)
            if word.kind == "exited":
                self._gone(f"{who} exited" + (f": {word.reason}" if word.reason else ""))
            return
        self._closed.wait(self._link.grace_seconds)
        with self._lock:
            back = rank.connections > 0 or rank.ended
        if not back:
            self._gone(f"{who} exited: its link closed without a goodbye")

    def _gone(self, text: str) -> None:
        if not self._closed.is_set():
            self._on_gone(text)


def _say(connection: socket.socket, kind: str, reason: str) -> None:
    try:
        connection.settimeout(1.0)
        connection.sendall(msgspec.json.encode(_Word(kind=kind, reason=reason)) + b"\n")
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side is gone, and learns it by the closed connection


class LinkClient:
    """Another rank's side, in its beat process. `on_gone(text)` is called once when rank 0 ended or is not reached."""

    def __init__(self, link: RankLink, on_gone: Callable[[str], None]) -> None:
        self._link = link
        self._on_gone = on_gone
        self._closed = threading.Event()
        self.connected = threading.Event()
        self._connection: socket.socket | None = None
        threading.Thread(target=self._run, name="rank-link", daemon=True).start()

    def close(self, word: str = "goodbye", reason: str = "") -> None:
        """Say goodbye (or "exited") and end the link; idempotent."""
        self._closed.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            _say(connection, word, reason)
            connection.close()

    def _run(self) -> None:
        patience = self._link.join_seconds
        while not self._closed.is_set():
            connection = self._connect(time.monotonic() + patience)
            if connection is None:
                break
            self._connection = connection
            self.connected.set()
            patience = self._link.grace_seconds
            line = _lines(connection)()
            self.connected.clear()
            if line and not self._closed.is_set():
                word = msgspec.json.decode(line, type=_Word)
                if word.kind == "exited":
                    self._on_gone(f"rank 0 exited: {word.reason}")
                return
        if not self._closed.is_set():
            self._on_gone(f"rank 0's beat at {self._link.host}:{self._link.port} cannot be reached")

    def _connect(self, until: float) -> socket.socket | None:
        link = self._link
        hello = _Hello(token=link.token, rank=link.rank, host_name=link.host_name or os.uname().nodename)
        while not self._closed.is_set() and time.monotonic() < until:
            connection: socket.socket | None = None
            try:
                connection = socket.create_connection((link.host, link.port), timeout=_CONNECT_SECONDS)
                _keep_alive(connection)
                connection.sendall(msgspec.json.encode(hello) + b"\n")
                if _lines(connection)():
                    connection.settimeout(None)
                    return connection
                connection.close()
            except OSError:
                if connection is not None:
                    connection.close()
            self._closed.wait(_RETRY_SECONDS)
        return None
