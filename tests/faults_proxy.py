"""A TCP proxy between one participant and etcd that swallows, resets or goes silent when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading

__all__ = ["Proxy"]

_BLOCK = 65536


class _Pair:
    """One proxied connection: two threads, one for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server = socket.create_connection(proxy.target, timeout=5.0)
        self.server.settimeout(None)
        self.deaf = False  # what the server says is dropped
        self.tail = b""
        for source, sink, upward in ((client, self.server, True), (self.server, client, False)):
            threading.Thread(target=self._pump, args=(source, sink, upward), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upward: bool) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(_BLOCK):
                if upward:
                    self._look(block)
                if not self.proxy.silent and (upward or not self.deaf):
                    sink.sendall(block)
        if not self.proxy.silent:
            self.close()

    def _look(self, block: bytes) -> None:
        word = self.proxy.word
        if word and word in self.tail + block:
            # etcd gets it and answers; the answer, and all that follows, is lost.
            self.proxy.word, self.deaf = b"", True
            self.proxy.swallowed.set()
        self.tail = block[-len(word) :] if word else b""

    def close(self) -> None:
        """End both connections with a reset."""
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()


class Proxy:
    """Listens on a loopback port and forwards to one etcd member. Close it at the end."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.word = b""
        self.swallowed = threading.Event()
        self.silent = False
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """`host:port` for the participant."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def swallow_after(self, word: str) -> None:
        """From the first request that contains `word` on, its connection gets no answer any more."""
        self.swallowed.clear()
        self.word = word.encode()

    def go_silent(self) -> None:
        """Black hole: connections stay open, nothing goes through in either direction."""
        self.silent = True

    def reset(self) -> None:
        """Everything passes again, on new connections; the old ones are reset."""
        self.silent, self.word = False, b""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def close(self) -> None:
        """Listen no more and end all connections."""
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    self._pairs.append(_Pair(self, client))
                except OSError:
                    client.close()
