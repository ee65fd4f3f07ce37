"""The thin shell around `decide`: follow etcd, campaign, and apply what is due, every write under our epoch."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import structlog

from . import model
from .action import Action, put
from .config import JobConfig
from .decide import decide
from .election import Candidate
from .errors import (
    AuthFailed,
    ConfigError,
    NoSpace,
    StoreError,
    StoreRewound,
    Unavailable,
)
from .follow import Follower
from .keys import Keys
from .ports import Compare, Delete, Op, Put, StateStore, Txn, TxnResult
from .session import Session
from .settings import read_config
from .view import FirstSeen, View

__all__ = ["Coordinator"]

LOG_ENTRIES = 2000
_MOST_OPS = 64  # in one transaction


class Coordinator:
    """One replica. Any number may run; the oldest candidate leads. No thread inside: call `step` in a loop.

    `session` is opened by the caller and renewed by its keeper (or by a simulator). A decision made from a view older
    than our own last write does nothing: its guards name what it saw.
    """

    def __init__(
        self,
        store: StateStore,
        keys: Keys,
        session: Session,
        identity: dict[str, object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._session = session
        self._candidate = Candidate(store, keys.leaders, session, identity)
        self._follower = Follower(store, keys.root, clock=clock)
        self._seen = FirstSeen({})
        self._cache: dict[str, tuple[int, model.Record]] = {}
        self._config: tuple[int, JobConfig] | None = None
        self._led = False
        self._campaigned = False
        self._stuck = ""
        self._line = 0  # the last line of history that we wrote: the view may be older
        self._log = structlog.get_logger().bind(job=keys.job, **identity)

    @property
    def leading(self) -> bool:
        """Whether this replica leads, as far as it knows."""
        return self._candidate.leading

    @property
    def view(self) -> View:
        """What this replica last saw."""
        return View(self._keys, self._follower.kvs, self._follower.revision, self._cache)

    def step(self, timeout_seconds: float) -> bool:
        """Wait for news for at most `timeout_seconds`, then do what is due; return whether anything was written.

        Raises `LeaseLost` when this replica's session is over, `StoreRewound` when etcd went back; rides out
        `Unavailable`.
        """
        self._session.check()
        try:
            self._follow(timeout_seconds)
            self._campaign()
            if not self._candidate.leading:
                return False
            return self._lead()
        except Unavailable as error:
            self._log.warning("etcd does not answer", error=str(error))
            return False
        except (AuthFailed, StoreRewound):
            raise
        except (StoreError, ConfigError) as error:
            # One bad record must not end every replica, nor be taken for an absent one: no decision until it is mended.
            if str(error) != self._stuck:
                self._log.error("nothing can be decided", error=str(error))
            self._stuck = str(error)
            return False

    def close(self) -> None:
        """Stop being a candidate, as far as etcd can be reached; the session is the caller's."""
        self._follower.close()
        try:
            self._candidate.resign()
        except (StoreError, Unavailable):
            self._log.info("could not resign; the lease will run out")

    # -- inside --------------------------------------------------------------------------------------------

    def _follow(self, timeout_seconds: float) -> None:
        self._follower.poll(timeout_seconds)
        changed = self._follower.changed_keys
        kvs = self._follower.kvs
        for key in changed:
            if key not in kvs:
                self._cache.pop(key, None)
        watched = set(changed)
        prefix = self._keys.participants
        for key in changed:
            # A participant's missing liveness key counts from when we first saw the two together.
            if key.startswith(prefix):
                watched.add(self._keys.alive(key[len(prefix) :]))
        view = self.view
        for key in changed:
            if (
                key.startswith(self._keys.requests)
                and key in kvs
                and not view.is_readable(key, model.Request)
            ):
                self._log.error("a request that cannot be read is passed over", key=key)
        self._seen.update(watched, view.mod, self._clock())

    def _campaign(self) -> None:
        ours = self._follower.changed_keys
        if self._campaigned and not any(key.startswith(self._keys.leaders) for key in ours):
            return
        self._campaigned = False  # news that met a store without an answer must not be forgotten
        leads = self._candidate.campaign()
        self._campaigned = self._candidate.epoch > 0
        if leads and not self._led:
            self._log.info("leading", epoch=self._candidate.epoch)
        elif self._led and not leads:
            self._log.warning("not leading any more")
        self._led = leads

    def _lead(self) -> bool:
        view = self.view
        config = self._settings(view)
        if config is None:
            return False
        written = False
        view.at = _now()
        for action in decide(view, self._seen, self._clock(), config):
            written |= self._apply(view, action)
        return written

    def _settings(self, view: View) -> JobConfig | None:
        record = view.config
        if record is None:
            return None
        revision = view.mod(self._keys.config)
        if self._config is None or self._config[0] != revision:
            self._config = (revision, read_config(record))
        return self._config[1]

    def _apply(self, view: View, action: Action) -> bool:
        """Try one decision, with its line of history in the same transaction."""
        number = self._next_line(view)
        entry = self._entry(view, action)
        compares: tuple[Compare, ...] = (self._candidate.guard(), *action.compares)
        bare = Txn(compares, action.ops)
        told = bare
        if entry is not None:
            key = self._keys.log(number)
            lines = (put(key, entry), *self._oldest_lines(view, _MOST_OPS - 1 - len(action.ops)))
            told = Txn((*compares, Compare(key, "create", "=", 0)), (*action.ops, *lines))
        try:
            result = self._send(told)
        except NoSpace as error:
            if entry is None or any(isinstance(op, Put) for op in action.ops):
                self._log.error("etcd is over its quota", action=action.name, error=str(error))
                return False
            # What only deletes must work in a full store too, and its line of history cannot.
            self._log.error("etcd is over its quota: history not written", text=entry.text, error=str(error))
            entry, result = None, self._send(bare)
        if not result.succeeded:
            self._log.debug("overtaken", action=action.name)
            return False
        self._log.debug("applied", action=action.name, revision=result.revision)
        if entry is not None:
            self._line = number
            self._log.info(entry.text, kind=entry.kind)
        return True

    def _send(self, txn: Txn) -> TxnResult:
        self._session.check()  # the one before may have taken long
        return self._store.txn(txn)

    def _entry(self, view: View, action: Action) -> model.LogEntry | None:
        if action.log is None:
            return None
        kind, text, fields = action.log
        return model.LogEntry(
            kind=kind,
            text=text,
            fields=fields,
            timeline=view.timeline,
            epoch=self._candidate.epoch,
            at=_now(),
        )

    def _next_line(self, view: View) -> int:
        """The number after the last line that there is; a line that nobody saw yet fails the transaction's compare."""
        lines = view.keys_under(self._keys.logs)
        seen = int(lines[-1].rsplit("/", 1)[1]) if lines else 0
        return max(seen, self._line) + 1

    def _oldest_lines(self, view: View, room: int) -> list[Op]:
        """Deletions of lines beyond the bound, as many as the transaction has room for."""
        lines = view.keys_under(self._keys.logs)
        return [Delete(key) for key in lines[: min(max(0, len(lines) - LOG_ENTRIES), max(0, room))]]


def _now() -> str:
    """Wall-clock time for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
