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
    Conflict,
    NoSpace,
    SlackwaterError,
    StoreError,
    StoreRewound,
    Unavailable,
)
from .follow import Follower
from .keys import Keys
from .ports import Compare, Delete, Op, StateStore, Txn
from .session import Session
from .settings import read_config
from .view import FirstSeen, View

__all__ = ["Coordinator"]

LOG_ENTRIES = 2000
_TRIM_BATCH = 50


class Coordinator:
    """One replica. Any number may run; the oldest candidate leads. No thread inside: call `step` in a loop.

    `session` is opened by the caller and renewed by its keeper (or by a simulator). The replica never acts on a view
    that is not newer than its own last write.
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
        txn = Txn((self._candidate.guard(), *action.compares), action.ops)
        self._session.check()  # the one before may have taken long
        try:
            result = self._store.txn(txn)
        except NoSpace as error:
            self._log.error("etcd is over its quota", action=action.name, error=str(error))
            return False
        except Conflict:
            return False
        if not result.succeeded:
            self._log.debug("overtaken", action=action.name)
            return False
        self._log.debug("applied", action=action.name, revision=result.revision)
        if action.log is not None:
            self._write_log(view, action)
        return True

    def _write_log(self, view: View, action: Action) -> None:
        if action.log is None:
            return
        kind, text, fields = action.log
        self._log.info(text, kind=kind)
        entry = model.LogEntry(
            kind=kind,
            text=text,
            fields=fields,
            timeline=view.timeline,
            epoch=self._candidate.epoch,
            at=_now(),
        )
        try:
            found = self._store.range(self._keys.logs)
            number = int(found.kvs[-1].key.rsplit("/", 1)[1]) + 1 if found.kvs else 1
            key = self._keys.log(number)
            ops: list[Op] = [put(key, entry)]
            if len(found.kvs) > LOG_ENTRIES:
                ops += [Delete(kv.key) for kv in found.kvs[:_TRIM_BATCH]]
            self._session.check()
            self._store.txn(Txn((self._candidate.guard(), Compare(key, "create", "=", 0)), tuple(ops)))
        except SlackwaterError as error:
            # History is for people; losing a line of it must not stop the job.
            self._log.warning("history not written", error=str(error))


def _now() -> str:
    """Wall-clock time for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
