"""Lease renewals of one store over one shared stream.

A stream for each renewal costs three times the processor time on both sides; one stream carries thousands.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import grpc

from ..engine.errors import SlackwaterError, Unavailable
from .etcd_channel import EtcdChannel
from .etcd_errors import is_stale_token
from .etcd_stubs import rpc

__all__ = ["LeaseStream"]


class _Pending:
    """One renewal that waits for its answer."""

    def __init__(self, lease: int) -> None:
        self.lease = lease
        self.answered = threading.Event()
        self.ttl_seconds = 0.0
        self.error: grpc.RpcError | None = None


class _Stream:
    """One open keepalive stream with the thread that reads it. Answers come in the order of the requests."""

    def __init__(self, channel: EtcdChannel) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._error: grpc.RpcError | None = None
        self._ended = False
        self._call = channel.open_stream(rpc.LeaseStub, "LeaseKeepAlive", self._feed())
        threading.Thread(target=self._read, name="etcd-keepalive", daemon=True).start()

    def _feed(self) -> Iterator[Any]:
        while True:
            request = self._requests.get()
            if request is None:
                return
            yield request

    def send(self, pending: _Pending) -> bool:
        """Queue a renewal; False when the stream has ended."""
        with self._lock:
            if self._ended:
                return False
            self._pending.append(pending)
            self._requests.put(rpc.LeaseKeepAliveRequest(ID=pending.lease))
            return True

    def _read(self) -> None:
        try:
            for reply in self._call:
                self._answer(reply.ID, float(reply.TTL))
        except grpc.RpcError as error:
            self._error = error
        finally:
            self.end()

    def _answer(self, lease: int, ttl_seconds: float) -> None:
        with self._lock:
            pending = self._pending.popleft() if self._pending else None
        if pending is None or pending.lease != lease:
            # An answer that fits no request: nothing on this stream can be trusted any more.
            self._call.cancel()
            return
        pending.ttl_seconds = ttl_seconds
        pending.answered.set()

    def end(self) -> None:
        """Cancel the stream and wake whoever waits; idempotent."""
        with self._lock:
            self._ended = True
            waiting = list(self._pending)
            self._pending.clear()
        self._requests.put(None)
        self._call.cancel()
        for pending in waiting:
            pending.error = self._error
            pending.ttl_seconds = -1.0
            pending.answered.set()


class LeaseStream:
    """Renews leases over one stream, opened when first needed and again after a fault. Thread-safe."""

    def __init__(self, channel: EtcdChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def keep_alive(self, lease: int) -> float:
        """Renew once: the TTL that the server answers, 0.0 when the lease is gone, `Unavailable` when it
        is silent.
        """
        deadline = time.monotonic() + self._channel.call_timeout_seconds
        for last in (False, True):
            pending = _Pending(lease)
            stream = self._send(pending)
            if not pending.answered.wait(max(0.0, deadline - time.monotonic())):
                self._discard(stream)
                raise Unavailable(f"{self._channel}: LeaseKeepAlive: no answer in time")
            if pending.ttl_seconds >= 0:
                return pending.ttl_seconds
            self._discard(stream)
            if last or not self._may_repeat(pending.error):
                raise self._failure(pending.error)
        raise Unavailable(f"{self._channel}: LeaseKeepAlive: no answer")

    def _may_repeat(self, error: grpc.RpcError | None) -> bool:
        if error is None:
            return True
        if self._channel.has_user and is_stale_token(error):
            self._channel.forget_token()
            return True
        return error.code() is grpc.StatusCode.UNAVAILABLE  # a renewal may always be sent again

    def _failure(self, error: grpc.RpcError | None) -> SlackwaterError:
        if error is None:
            return Unavailable(f"{self._channel}: LeaseKeepAlive: the stream ended")
        return self._channel.translated(error, "LeaseKeepAlive")

    def _send(self, pending: _Pending) -> _Stream:
        with self._lock:
            if self._stream is None or not self._stream.send(pending):
                self._stream = _Stream(self._channel)
                self._stream.send(pending)
            return self._stream

    def _discard(self, stream: _Stream) -> None:
        with self._lock:
            if self._stream is stream:
                self._stream = None
        stream.end()

    def close(self) -> None:
        """End the stream; waiting renewals raise `Unavailable`."""
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
