"""What lies between a process and the store: delay, loss before or after the effect, late effects, stale watches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slackwater.backends.memory import MemoryStore
from slackwater.engine.errors import Compacted, NoSpace, SlackwaterError, Unavailable
from slackwater.engine.ports import KV, Put, RangeResult, Txn, TxnResult, WatchBatch

from .kernel import Kernel, Process

__all__ = ["Dam", "Network", "StoreProxy", "Trap", "Weather", "rpc"]

CALL_TIMEOUT = 1.0


@dataclass
class Dam:
    """Until `until` every transaction of `who` that writes below `key` waits, then all land in their order."""

    who: str
    key: str
    until: float


@dataclass
class Trap:
    """Strikes once, when a transaction of `who` that writes below `key` (with `text` in a value) was applied.

    With `before` it strikes when the transaction is about to leave its sender.
    """

    who: str
    key: str
    text: str
    before: bool
    strike: Callable[[], None]

    def matches(self, process: Process, txn: Txn, root: str) -> bool:
        """Whether it strikes at this transaction."""
        return process.name.startswith(self.who) and any(
            op.key[len(root) :].startswith(self.key)
            and (not self.text or (isinstance(op, Put) and self.text.encode() in op.value))
            for op in txn.ops
        )


@dataclass
class Weather:
    """A spell of bad network for the processes whose name begins with `who` ("who/beat": their beats alone).

    `kind` is one of drop, lost, late, slow, watch, duplicate, echo; `chance` its probability for each call.
    """

    who: str
    kind: str
    until: float
    chance: float


class Network:
    """The store, the weather, and who waits for news of it."""

    def __init__(self, kernel: Kernel, store: MemoryStore) -> None:
        self.kernel = kernel
        self.store = store
        self.weather: list[Weather] = []
        self._waiting: list[tuple[Process, Callable[[Any], None]]] = []
        self._seen = store.revision
        self.dams: list[Dam] = []
        self.traps: list[Trap] = []
        self.root = ""
        self.full_until = 0.0
        self.on_sent: Callable[[Process, Txn], None] | None = None
        self.on_applied: Callable[[Process, Txn], None] | None = None
        self.before_apply: Callable[[], None] = lambda: None

    def fate(self, process: Process, rng: Any) -> str:
        """What happens to one call of a process."""
        if not self.weather:
            return ""
        now = self.kernel.now
        self.weather = [spell for spell in self.weather if spell.until > now]
        for spell in self.weather:
            who, _, part = spell.who.partition("/")
            if not process.name.startswith(who) or not process.name.endswith(part):
                continue
            if spell.kind == "echo" and not process.name.endswith("/beat"):
                continue
            if rng.random() < spell.chance:
                return spell.kind
        return ""

    def apply(self, process: Process, txn: Txn) -> TxnResult:
        """Apply a transaction of a process, letting `on_applied` know first."""
        store = self.store
        if self.is_full and any(isinstance(op, Put) for op in txn.ops):
            raise NoSpace("the store is over its quota")
        if self.on_applied is not None:
            if store._expiries and store._expiries[0][0] <= self.kernel.now:
                store.expire()
            self.before_apply()
            if all(store._holds(compare) for compare in txn.compares):
                self.on_applied(process, txn)
        result = store.txn(txn)
        if result.succeeded and self.traps:
            self.spring(process, txn, before=False)
        return result

    @property
    def is_full(self) -> bool:
        """Over its quota a store refuses what puts or grants, and accepts deletes."""
        return self.kernel.now < self.full_until

    def grant(self, ttl_seconds: int) -> int:
        """A lease, unless the store is full."""
        if self.is_full:
            raise NoSpace("the store is over its quota")
        return self.store.grant(ttl_seconds)

    def spring(self, process: Process, txn: Txn, *, before: bool) -> None:
        """Let the traps strike that wait for this transaction."""
        for trap in [trap for trap in self.traps if trap.before is before]:
            if trap.matches(process, txn, self.root):
                self.traps.remove(trap)
                trap.strike()

    def held(self, process: Process, txn: Txn) -> float:
        """For how long a dam keeps a transaction back."""
        now = self.kernel.now
        self.dams = [dam for dam in self.dams if dam.until > now]
        return max(
            (
                dam.until - now
                for dam in self.dams
                if process.name.startswith(dam.who)
                and any(op.key[len(self.root) :].startswith(dam.key) for op in txn.ops)
            ),
            default=0.0,
        )

    def notify(self) -> None:
        """Wake those who wait for news; called after every event."""
        if self.store.revision == self._seen:
            return
        self._seen = self.store.revision
        waiting, self._waiting = self._waiting, []
        for _, wake in waiting:
            self.kernel.after(0.002, lambda wake=wake: wake(True))

    def listen(self, process: Process, wake: Callable[[Any], None]) -> None:
        """Wake this one at the next change."""
        self._waiting.append((process, wake))


def rpc(
    network: Network,
    process: Process,
    rng: Any,
    call: Callable[[], Any],
    what: str,
    *,
    read: bool = False,
    held: float = 0.0,
) -> Any:
    """Send a request from a process; it may be lost, land late, or its answer may be lost."""
    process.check()
    kernel = network.kernel
    fate = network.fate(process, rng)
    if fate == "drop" or (fate == "late" and read):
        process.sleep(CALL_TIMEOUT)
        raise Unavailable(f"{what}: no answer")
    delay = held + rng.expovariate(500.0) + 0.0005
    if fate == "slow":
        delay += rng.uniform(0.1, 3.0)

    def execute() -> tuple[bool, Any]:
        try:
            return True, call()
        except SlackwaterError as error:
            return False, error

    if fate in ("lost", "late"):
        arrives = delay if fate == "lost" else rng.uniform(CALL_TIMEOUT, 8 * CALL_TIMEOUT)
        kernel.after(arrives, lambda: (execute(), None)[1])
        process.sleep(rng.choice((0.05, CALL_TIMEOUT)))
        raise Unavailable(f"{what}: no answer")
    if fate == "echo":  # done at once, heard late

        def arrange(done: Callable[[Any], None]) -> None:
            def land() -> None:
                found = execute()
                kernel.after(0.9, lambda: done(found))

            kernel.after(min(delay, 0.05), land)
    else:

        def arrange(done: Callable[[Any], None]) -> None:
            kernel.after(delay, lambda: done(execute()))

    answer = process.wait(CALL_TIMEOUT, arrange)
    if answer is None:
        raise Unavailable(f"{what}: no answer")
    good, value = answer
    if not good:
        raise value
    return value


class StoreProxy:
    """`StateStore` as one process reaches it."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._rng = network.kernel.rng(process.name)

    def _call(self, call: Callable[[], Any], what: str, *, read: bool = False) -> Any:
        return rpc(self._network, self._process, self._rng, call, what, read=read)

    def get(self, key: str) -> KV | None:
        found: KV | None = self._call(lambda: self._network.store.get(key), f"get {key}", read=True)
        return found

    def range(self, prefix: str, revision: int = 0) -> RangeResult:
        found: RangeResult = self._call(
            lambda: self._network.store.range(prefix, revision), f"range {prefix}", read=True
        )
        return found

    def txn(self, txn: Txn) -> TxnResult:
        network, process = self._network, self._process
        if network.on_sent is not None:
            network.on_sent(process, txn)
        if network.traps:
            network.spring(process, txn, before=True)
        held = network.held(process, txn) if network.dams else 0.0
        done: TxnResult = rpc(
            network, process, self._rng, lambda: network.apply(process, txn), "txn", held=held
        )
        return done

    def grant(self, ttl_seconds: int) -> int:
        lease: int = self._call(lambda: self._network.grant(ttl_seconds), "grant")
        return lease

    def keep_alive(self, lease: int) -> float:
        ttl: float = self._call(lambda: self._network.store.keep_alive(lease), "keep_alive")
        return ttl

    def revoke(self, lease: int) -> None:
        self._call(lambda: self._network.store.revoke(lease), "revoke")

    def watch(self, prefix: str, from_revision: int) -> WatchProxy:
        return WatchProxy(self._network, self._process, self._rng, prefix, from_revision)

    def cluster_id(self) -> int:
        self._process.check()
        return self._network.store.cluster_id()

    def close(self) -> None:
        return


class WatchProxy:
    """A watch that lags, repeats itself, breaks and is overtaken by compaction."""

    def __init__(self, network: Network, process: Process, rng: Any, prefix: str, from_revision: int) -> None:
        self._network, self._process, self._rng = network, process, rng
        self._prefix, self._next = prefix, from_revision
        self._dead = False
        self._stalled_until = 0.0
        self._last: WatchBatch | None = None

    def next(self, timeout_seconds: float) -> WatchBatch | None:
        self._process.check()
        kernel = self._network.kernel
        deadline = kernel.now + timeout_seconds
        while True:
            if self._dead:
                raise Unavailable("the watch is closed")
            batch = self._read() if kernel.now >= self._stalled_until else None
            if batch is not None:
                return batch
            remaining = deadline - kernel.now
            if remaining <= 1e-6:
                return None
            if kernel.now < self._stalled_until:
                self._process.sleep(min(remaining, self._stalled_until - kernel.now))
            else:
                self._process.wait(remaining, lambda wake: self._network.listen(self._process, wake))

    def _read(self) -> WatchBatch | None:
        store, rng = self._network.store, self._rng
        if self._next <= store._compacted and self._next <= store.revision:
            self._dead = True
            raise Compacted(f"revision {self._next} has been compacted", store._compacted)
        if self._next > store.revision:
            return None
        fate = self._network.fate(self._process, rng)
        if fate == "drop":
            self._dead = True
            raise Unavailable("the watch broke")
        if fate in ("watch", "late", "slow"):
            self._stalled_until = self._network.kernel.now + rng.uniform(0.1, 8.0)
            return None
        if fate == "duplicate" and self._last is not None:
            batch, self._last = self._last, None
            return batch
        history = store.history
        start = bisect_left(history, self._next, key=lambda change: change.event.kv.mod_revision)
        last = store.revision
        if rng.random() < 0.2:
            last = rng.randint(self._next, last)
        events = []
        for index in range(start, len(history)):
            event = history[index].event
            if event.kv.mod_revision > last:
                break
            if event.kv.key.startswith(self._prefix):
                events.append(event)
        self._next = last + 1
        self._last = WatchBatch(tuple(events), last)
        return self._last

    def close(self) -> None:
        self._dead = True
