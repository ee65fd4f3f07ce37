"""A watch on etcd that is never silently dead.

A server that is stopped, or that a broken network hides, leaves a watch silent for ever. So silence is
answered by a progress request, and a progress request without an answer ends the watch with `Unavailable`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ..engine.errors import AuthFailed, StoreRewound, Unavailable
from ..engine.ports import KV, Event, WatchBatch, prefix_end
from .etcd_channel import EtcdChannel
from .etcd_errors import refused_watch
from .etcd_stubs import rpc

__all__ = ["EtcdWatch", "to_kv"]

_GRACE_SECONDS = 0.25  # after a pause of our own process the answer may be here, but not read yet
_QUEUE_LENGTH = 256  # a slow reader makes gRPC's flow control hold the server back


def to_kv(kv: Any) -> KV:
    """Read etcd's KeyValue message."""
    return KV(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


class EtcdWatch:
    """Changes below a prefix. For one reading thread; `close` may come from any.

    An empty batch reports that the stream is alive; its revision is that of the last event delivered (etcd
    before 3.4.25 and 3.5.8 may report a progress that is ahead of its own events, so theirs is not passed
    on).
    """

    def __init__(
        self,
        channel: EtcdChannel,
        prefix: str,
        from_revision: int,
        *,
        store_revision: Callable[[], int],
        progress_seconds: float = 1.0,
        watchdog_seconds: float = 5.0,
    ) -> None:
        self._channel = channel
        self._prefix = prefix
        self._delivered = from_revision - 1
        self._store_revision = store_revision
        self._progress_seconds = progress_seconds
        self._watchdog_seconds = watchdog_seconds
        self._pid = os.getpid()
        self._stream: _WatchStream | None = None
        self._created = False
        self._retried_token = False
        self._asked_at: float | None = None
        self._heard_at = 0.0
        self._dead = False

    def __str__(self) -> str:
        return f"{self._channel}: watch on {self._prefix}"

    def next(self, timeout_seconds: float) -> WatchBatch | None:
        """Wait for events or a sign of life; None when neither came in time. After an error the watch is
        dead.
        """
        if self._dead:
            raise Unavailable(f"{self}: closed")
        try:
            return self._next(time.monotonic() + timeout_seconds)
        except BaseException:
            self.close()
            raise

    def _next(self, deadline: float) -> WatchBatch | None:
        while True:
            stream = self._connected()
            now = time.monotonic()
            wait_until = min(deadline, self._due(now))
            reply = stream.take(max(0.0, wait_until - now))
            if reply is not None:
                batch = self._handle(reply)
                if batch is not None:
                    return batch
                continue
            if self._dead:
                raise Unavailable(f"{self}: closed")
            self._watchdog(stream)
            if time.monotonic() >= deadline:
                return None

    def _connected(self) -> _WatchStream:
        if self._stream is None:
            request = rpc.WatchRequest(
                create_request=rpc.WatchCreateRequest(
                    key=self._prefix.encode(),
                    range_end=prefix_end(self._prefix),
                    start_revision=self._delivered + 1,
                )
            )
            self._stream = _WatchStream(self._channel, request)
            self._created = False
            self._asked_at = self._heard_at = time.monotonic()
        return self._stream

    # -- silence -------------------------------------------------------------------------------------------

    def _due(self, now: float) -> float:
        """When silence has to be looked at next."""
        if self._asked_at is not None:
            return max(now + 0.001, self._asked_at + self._watchdog_seconds)
        return max(now, self._heard_at + self._progress_seconds)

    def _watchdog(self, stream: _WatchStream) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            if now >= self._heard_at + self._progress_seconds:
                stream.send(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
                self._asked_at = now
        elif now >= self._asked_at + self._watchdog_seconds and not stream.waiting(_GRACE_SECONDS):
            raise Unavailable(f"{self}: silent for {now - self._heard_at:.1f} s")

    # -- answers -------------------------------------------------------------------------------------------

    def _handle(self, reply: Any) -> WatchBatch | None:
        self._heard_at, self._asked_at = time.monotonic(), None
        if isinstance(reply, grpc.RpcError):
            raise self._channel.translated(reply, f"watch on {self._prefix}")
        if reply.canceled:
            self._cancelled(reply)
            return None
        if reply.header.revision < self._delivered:
            self._check_rewound(reply.header.revision)
        if reply.created:
            self._created = True
            return None
        if not reply.events:
            return WatchBatch((), self._delivered)
        events = tuple(_event(event) for event in reply.events if event.kv.mod_revision > self._delivered)
        self._delivered = max(self._delivered, reply.events[-1].kv.mod_revision)
        return WatchBatch(events, self._delivered)

    def _cancelled(self, reply: Any) -> None:
        # A forbidden key and an expired token both answer "created" and "canceled" at once.
        error = refused_watch(reply.cancel_reason, reply.compact_revision, str(self))
        if isinstance(error, AuthFailed) and self._channel.has_user and not self._retried_token:
            self._retried_token = True
            self._channel.forget_token()
            if self._stream is not None:
                self._stream.end()
            self._stream = None
            return
        raise error

    def _check_rewound(self, revision: int) -> None:
        """A member may lag behind; only a linearizable read tells whether the whole store went back."""
        if self._store_revision() < self._delivered:
            raise StoreRewound(f"{self}: the store is at {revision}, but {self._delivered} was seen")

    def close(self) -> None:
        """End the stream; idempotent, does not block."""
        self._dead = True
        stream = self._stream
        if stream is not None and os.getpid() == self._pid:
            stream.end()


class _WatchStream:
    """The open stream and the thread that reads it into a short queue."""

    def __init__(self, channel: EtcdChannel, request: Any) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(request)
        self._replies: queue.Queue[Any] = queue.Queue(_QUEUE_LENGTH)
        self._ended = threading.Event()
        self._arrived = threading.Event()
        self._call = channel.open_stream(rpc.WatchStub, "Watch", self._feed())
        threading.Thread(target=self._read, name="etcd-watch", daemon=True).start()

    def _feed(self) -> Iterator[Any]:
        while True:
            request = self._requests.get()
            if request is None:
                return
            yield request

    def _read(self) -> None:
        try:
            for reply in self._call:
                self._put(reply)
            self._put(_Ended())
        except grpc.RpcError as error:
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._ended.is_set():
            try:
                self._replies.put(item, timeout=0.5)
            except queue.Full:
                continue
            self._arrived.set()
            return

    def send(self, request: Any) -> None:
        self._requests.put(request)

    def take(self, timeout_seconds: float) -> Any:
        """The next reply or error; None when nothing came in time or the stream was ended by us."""
        try:
            item = (
                self._replies.get(timeout=timeout_seconds)
                if timeout_seconds > 0
                else self._replies.get_nowait()
            )
        except queue.Empty:
            return None
        if isinstance(item, _Ended):
            raise Unavailable("the server ended the watch")
        return item

    def waiting(self, timeout_seconds: float) -> bool:
        """Whether a reply is there, or comes within a moment."""
        self._arrived.clear()
        return not self._replies.empty() or self._arrived.wait(timeout_seconds)

    def end(self) -> None:
        """Cancel; wakes a reader that waits in `take`."""
        self._ended.set()
        self._requests.put(None)
        self._call.cancel()
        try:
            self._replies.put_nowait(_Ended())
        except queue.Full:
            return


class _Ended:
    """The stream is over without an error."""


def _event(event: Any) -> Event:
    return Event("put" if event.type == 0 else "delete", to_kv(event.kv))
