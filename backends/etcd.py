"""The state store on a real etcd cluster."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.errors import Compacted, ConfigError, LeaseLost, StoreRewound
from ..engine.ports import KV, Compare, Delete, Op, Put, RangeResult, Txn, TxnResult, prefix_end
from .etcd_channel import EtcdChannel
from .etcd_lease import LeaseStream
from .etcd_stubs import rpc
from .etcd_watch import EtcdWatch, to_kv

__all__ = ["EtcdStore"]

_PAGE_KEYS = 512
_RELIST_ATTEMPTS = 5
_TARGETS = {"version": 0, "create": 1, "mod": 2, "lease": 4}
_OPERANDS = {"version": "version", "create": "create_revision", "mod": "mod_revision", "lease": "lease"}
_RELATIONS = {"=": 0, ">": 1, "<": 2, "!=": 3}


class EtcdStore:
    """`StateStore` over gRPC to every member of a cluster; the constructor checks its arguments and
    connects nothing.

    `endpoints` are `host:port`, `http://host:port` or `https://host:port`. `ca`, `cert` and `key` are PEM
    files. `call_timeout_seconds` bounds each call; keep it below a third of the shortest lease. Every reply
    is checked against the cluster id and the highest revision seen before: `StoreRewound` when the store
    went back. Not usable in a forked child (`ForkedClient`). Close it when done.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        call_timeout_seconds: float = 5.0,
    ) -> None:
        self._channel = EtcdChannel(
            endpoints,
            user=user,
            password=password,
            ca=ca,
            cert=cert,
            key=key,
            call_timeout_seconds=call_timeout_seconds,
        )
        self._leases = LeaseStream(self._channel)
        self._lock = threading.Lock()
        self._cluster_id = 0
        self._revision = 0

    def __str__(self) -> str:
        return str(self._channel)

    # -- reads ---------------------------------------------------------------------------------------------

    def get(self, key: str) -> KV | None:
        """Return the key, or None when it is absent; linearizable."""
        reply = self._read("Range", rpc.RangeRequest(key=key.encode()))
        return to_kv(reply.kvs[0]) if reply.kvs else None

    def range(self, prefix: str, revision: int = 0) -> RangeResult:
        """Return everything below `prefix` at one revision, read in pages."""
        for attempt in range(1, _RELIST_ATTEMPTS + 1):
            try:
                return self._list(prefix, revision)
            except Compacted:
                # The first page fixed a revision that was compacted before the last page.
                if revision or attempt == _RELIST_ATTEMPTS:
                    raise
        raise Compacted(f"{self}: {prefix} changes faster than it can be listed")

    def _list(self, prefix: str, revision: int) -> RangeResult:
        kvs: list[KV] = []
        start, end = prefix.encode(), prefix_end(prefix)
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=_PAGE_KEYS, revision=revision)
            reply = self._read("Range", request)
            revision = revision or reply.header.revision
            kvs.extend(to_kv(kv) for kv in reply.kvs)
            if not reply.more or not reply.kvs:
                return RangeResult(tuple(kvs), revision)
            start = reply.kvs[-1].key + b"\0"

    def cluster_id(self) -> int:
        """The id that every reply of this cluster carries."""
        self.revision()
        return self._cluster_id

    def revision(self) -> int:
        """The store's revision now, by a linearizable read."""
        return int(self._read("Range", rpc.RangeRequest(key=b"/", count_only=True)).header.revision)

    # -- writes --------------------------------------------------------------------------------------------

    def txn(self, txn: Txn) -> TxnResult:
        """Apply a transaction; `LeaseLost` when a put names a lease that is gone (nothing was written)."""
        request = rpc.TxnRequest(
            compare=[_compare(compare) for compare in txn.compares],
            success=[_request_op(op) for op in txn.ops],
        )
        reply = self._write(rpc.KVStub, "Txn", request)
        return TxnResult(bool(reply.succeeded), int(reply.header.revision))

    def grant(self, ttl_seconds: int) -> int:
        """Create a lease and return its id; etcd may grant longer than asked, never shorter."""
        if ttl_seconds < 1:
            raise ConfigError(f"a lease of {ttl_seconds} s is impossible")
        return int(self._write(rpc.LeaseStub, "LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_seconds)).ID)

    def keep_alive(self, lease: int) -> float:
        """Renew a lease over the store's shared stream; 0.0 when it is gone."""
        self._channel.check_process()
        return self._leases.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        """Delete a lease and its keys; a lease that is gone is no error."""
        try:
            self._write(rpc.LeaseStub, "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            return

    def compact(self, revision: int) -> None:
        """Forget the history before `revision` (the cluster's own auto compaction does this by itself)."""
        self._write(rpc.KVStub, "Compact", rpc.CompactionRequest(revision=revision, physical=True))

    # -- watch, close --------------------------------------------------------------------------------------

    def watch(
        self, prefix: str, from_revision: int, *, progress_seconds: float = 1.0, watchdog_seconds: float = 5.0
    ) -> EtcdWatch:
        """Watch changes below `prefix`; connects at the first `next`.

        After `progress_seconds` of silence the server is asked for a sign of life (by `next`, in its caller's
        thread); without an answer within `watchdog_seconds` the watch ends with `Unavailable`.
        """
        self._channel.check_process()
        return EtcdWatch(
            self._channel,
            prefix,
            from_revision,
            store_revision=self.revision,
            progress_seconds=progress_seconds,
            watchdog_seconds=watchdog_seconds,
        )

    def close(self) -> None:
        """Close every connection; idempotent."""
        self._leases.close()
        self._channel.close()

    # -- the store's own history ---------------------------------------------------------------------------

    def _read(self, method: str, request: Any) -> Any:
        seen = self._revision
        reply = self._channel.read(rpc.KVStub, method, request)
        self._observe(reply.header, seen)
        return reply

    def _write(self, service: Any, method: str, request: Any) -> Any:
        seen = self._revision
        reply = self._channel.write(service, method, request)
        self._observe(reply.header, seen)
        return reply

    def _observe(self, header: Any, seen_before: int) -> None:
        """Compare with what was known when the call was sent: a later reply to an earlier call is no
        step back.
        """
        with self._lock:
            if self._cluster_id == 0:
                self._cluster_id = header.cluster_id
            if header.cluster_id != self._cluster_id:
                raise StoreRewound(
                    f"{self}: cluster {header.cluster_id:x} answers where {self._cluster_id:x} did before"
                )
            if header.revision < seen_before:
                raise StoreRewound(
                    f"{self}: the store is at revision {header.revision}, {seen_before} was seen"
                )
            self._revision = max(self._revision, header.revision)


def _compare(compare: Compare) -> Any:
    fields: dict[str, Any] = {
        "key": compare.key.encode(),
        "target": _TARGETS[compare.field],
        "result": _RELATIONS[compare.relation],
        _OPERANDS[compare.field]: compare.operand,
    }
    if compare.prefix:
        fields["range_end"] = prefix_end(compare.key)
    return rpc.Compare(**fields)


def _request_op(op: Op) -> Any:
    if isinstance(op, Put):
        put = rpc.PutRequest(key=op.key.encode(), value=op.value, lease=op.lease)
        return rpc.RequestOp(request_put=put)
    return rpc.RequestOp(request_delete_range=_delete(op))


def _delete(op: Delete) -> Any:
    end = prefix_end(op.key) if op.prefix else b""
    return rpc.DeleteRangeRequest(key=op.key.encode(), range_end=end)
