"""One incarnation of a participant: how it registers, and the fences that every transaction of it carries."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Sequence

import msgspec

from .action import put
from .beatport import BeatPort
from .errors import Fenced, LeaseLost, NoSpace, Refused, SlotOccupied, Unavailable
from .keys import Keys
from .model import Ack, Alive, Participant, decode
from .ports import KV, Compare, Delete, Op, StateStore, Txn
from .view import View

__all__ = ["Membership"]

_TRIES = 5


class Membership:
    """A participant's registration in one job, on one timeline at a time. Not thread-safe.

    A transaction of ours has effect only while the timeline is the one we joined (or acknowledged), the registration
    is the one we wrote, and the liveness key is our own. `join` again makes a new incarnation.
    """

    def __init__(self, store: StateStore, keys: Keys, template: Participant, beat: BeatPort) -> None:
        self._store = store
        self.beat = beat
        self.keys = keys
        self.record = template
        self.timeline_mod = 0
        self.registration_mod = 0
        self._alive_create = 0
        self._adopted = False
        self.last_report = Alive(incarnation="")
        self.written_revision = 0  # of our newest write: an older view says nothing about it

    @property
    def name(self) -> str:
        """The participant's name."""
        return self.record.name

    @property
    def incarnation(self) -> str:
        """This life's id."""
        return self.record.incarnation

    @property
    def timeline(self) -> int:
        """The timeline that we joined or acknowledged last."""
        return self.record.timeline

    @property
    def alive_create(self) -> int:
        """Create-revision of our liveness key: the beat's, which may have taken a new lease, or the registration's."""
        return self.beat.alive_create if self._adopted else self._alive_create

    # -- joining -------------------------------------------------------------------------------------------

    def join(self, alive: Alive, *, covers_step: int = -1) -> None:
        """Open the beat's lease and register as a new incarnation under it. Blocks for a few calls.

        Raises `SlotOccupied` while another incarnation's liveness key is there, `Refused` without a job.
        """
        incarnation = uuid.uuid4().hex[:12]
        self._adopted = False
        lease = self.beat.open()
        for _ in range(_TRIES):
            timeline_kv = self._store.get(self.keys.timeline)
            if timeline_kv is None:
                raise Refused(f"there is no job {self.keys.job!r} in this etcd")
            timeline = int(msgspec.json.decode(timeline_kv.value)["timeline"])
            record = msgspec.structs.replace(
                self.record,
                incarnation=incarnation,
                timeline=timeline,
                ended="",
                reason="",
                covers_step=covers_step,
                at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            )
            alive = msgspec.structs.replace(alive, incarnation=incarnation)
            if self._register(record, lease, alive, timeline_kv):
                self.last_report = alive
                self.beat.adopt(self, alive)
                self._adopted = True
                return
        raise Unavailable(f"{self.name}: could not register; etcd does not answer reliably")

    def _register(self, record: Participant, lease: int, alive: Alive, timeline_kv: KV) -> bool:
        key, alive_key = self.keys.participant(self.name), self.keys.alive(self.name)
        other = self._store.get(alive_key)
        if other is not None:
            found = decode(Alive, other.value, alive_key)
            if found.incarnation == record.incarnation:
                return self._adopt(record, other)
            raise SlotOccupied(
                f"{self.name} of job {self.keys.job!r} is already running (incarnation {found.incarnation})"
            )
        registered = self._store.get(key)
        compares = (
            Compare(alive_key, "create", "=", 0),
            Compare(key, "mod", "=", registered.mod_revision if registered is not None else 0),
            Compare(self.keys.timeline, "mod", "=", timeline_kv.mod_revision),
        )
        try:
            result = self._store.txn(Txn(compares, (put(key, record), put(alive_key, alive, lease))))
        except Unavailable:
            return False  # the next try reads our own key back
        if not result.succeeded:
            return False
        self.record = record
        self.registration_mod = self._alive_create = result.revision
        self.timeline_mod = timeline_kv.mod_revision
        return True

    def _adopt(self, record: Participant, alive: KV) -> bool:
        """Our own registration, found after a lost reply."""
        key = self.keys.participant(self.name)
        mine = self._store.get(key)
        timeline = self._store.get(self.keys.timeline)
        if mine is None or timeline is None:
            return False
        found = decode(Participant, mine.value, key)
        if found.incarnation != record.incarnation:
            return False
        self.record = found
        self.registration_mod, self._alive_create = mine.mod_revision, alive.create_revision
        # The timeline may have moved on since: then this one is over for us until we acknowledge the next.
        self.timeline_mod = timeline.mod_revision if timeline.mod_revision <= mine.mod_revision else -1
        return True

    # -- what every transaction compares -------------------------------------------------------------------

    def fences(self) -> tuple[Compare, ...]:
        """Our timeline, our registration and our liveness key are what they were."""
        return (
            Compare(self.keys.timeline, "mod", "=", self.timeline_mod),
            Compare(self.keys.participant(self.name), "mod", "=", self.registration_mod),
            Compare(self.keys.alive(self.name), "create", "=", self.alive_create),
        )

    def standing(self, view: View) -> str:
        """ "ours", "fenced" (a newer timeline waits for our acknowledgement) or "replaced" (this life is over)."""
        registered, health = view.participant(self.name), view.health(self.name)
        if view.revision < self.registration_mod:
            return "ours"  # the view is older than our own registration
        if registered is None or registered.incarnation != self.incarnation or registered.ended:
            return "replaced"
        if health is not None and health.incarnation == self.incarnation and health.state == "failed":
            return "replaced"
        if view.mod(self.keys.participant(self.name)) > self.registration_mod:
            self._landed_late(view, registered)
        if view.mod(self.keys.timeline) != self.timeline_mod and view.timeline > self.timeline:
            return "fenced"
        return "ours"

    def _landed_late(self, view: View, registered: Participant) -> None:
        """An acknowledgement of ours, given up as unknown, took effect: only we write under our incarnation."""
        self.record = registered
        self.registration_mod = view.mod(self.keys.participant(self.name))
        current = view.timeline == registered.timeline
        self.timeline_mod = view.mod(self.keys.timeline) if current else -1
        self.beat.adopt(self, self.last_report)

    def check(self) -> None:
        """Raise `LeaseLost` unless effects outside this process are allowed now."""
        if not self.beat.alive():
            raise LeaseLost(f"{self.name}: {self.beat.lost or 'the lease could not be renewed in time'}")

    # -- writing -------------------------------------------------------------------------------------------

    def write(
        self,
        ops: Sequence[Op],
        compares: Sequence[Compare] = (),
        landed: Callable[[], bool] = lambda: False,
        *,
        final: bool = False,
    ) -> bool:
        """Apply a fenced transaction; False when a compare failed, so that nothing was written by us.

        After an unknown outcome the identical transaction is sent again; `landed` recognises an earlier success of
        our own. Raises `Unavailable` when the outcome stays unknown, `LeaseLost` when our lease may have expired.
        With `final` a refusal counts as unknown when an earlier copy may still be on its way and land later.
        """
        self.check()
        return self._apply(Txn((*self.fences(), *compares), tuple(ops)), landed, final=final) > 0

    def _apply(self, txn: Txn, landed: Callable[[], bool], *, final: bool = False) -> int:
        unsure = False
        for _ in range(_TRIES):
            try:
                result = self._store.txn(txn)
                if result.succeeded:
                    self.written_revision = max(self.written_revision, result.revision)
                    return result.revision
                if unsure and landed():
                    revision = self._store.range(self.keys.participant(self.name)).revision
                    self.written_revision = max(self.written_revision, revision)
                    return 1
                if unsure and final:
                    break
                return 0
            except Unavailable:
                unsure = True
            except NoSpace:
                if unsure and final:
                    break  # an earlier copy may land once there is space
                raise
        raise Unavailable(f"{self.name}: the outcome of a transaction is unknown")

    def acknowledge_phase(self, ack: Ack) -> None:
        """Answer a later phase of the recovery whose timeline we are on. `Fenced` when that is over."""
        ack = msgspec.structs.replace(ack, name=self.name, incarnation=self.incarnation)
        key = self.keys.ack(ack.recovery, self.name)
        if ack.recovery != self.timeline or not self.write(
            [put(key, ack)], landed=lambda: self._stored(key, ack)
        ):
            raise Fenced(f"{self.name}: recovery {ack.recovery} is not ours any more")

    def acknowledge(self, view: View, ack: Ack) -> None:
        """Answer the fence of recovery `ack.recovery` and move to its timeline.

        The same incarnation stays: this is no new registration. Raises `Fenced` when this life is over or the
        recovery is another one by now.
        """
        self.check()
        ack = msgspec.structs.replace(ack, name=self.name, incarnation=self.incarnation)
        key = self.keys.ack(ack.recovery, self.name)
        timeline_mod = view.mod(self.keys.timeline)
        record = msgspec.structs.replace(self.record, timeline=ack.recovery)
        participant_key = self.keys.participant(self.name)
        compares = (
            Compare(self.keys.timeline, "mod", "=", timeline_mod),
            Compare(participant_key, "mod", "=", self.registration_mod),
            Compare(self.keys.alive(self.name), "create", "=", self.alive_create),
        )
        txn = Txn(compares, (put(participant_key, record), put(key, ack)))
        revision = self._apply(txn, lambda: self._stored(key, ack))
        if revision == 0:
            raise Fenced(f"{self.name}: recovery {ack.recovery} is not ours any more")
        if revision == 1:
            found = self._store.get(participant_key)
            if found is None:
                raise Fenced(f"{self.name}: the registration is gone")
            revision = found.mod_revision
        self.record, self.timeline_mod, self.registration_mod = record, timeline_mod, revision
        self.beat.adopt(self, self.last_report)

    def report(self, alive: Alive) -> None:
        """Hand the newest report to the beat, under our incarnation."""
        self.last_report = msgspec.structs.replace(alive, incarnation=self.incarnation)
        self.beat.report(self.last_report)

    def _stored(self, key: str, record: msgspec.Struct) -> bool:
        kv = self._store.get(key)
        return kv is not None and kv.value == msgspec.json.encode(record)

    def end(self, ended: str, reason: str = "") -> bool:
        """Say that this life is over ("left": a clean goodbye, "exited": the process is gone)."""
        record = msgspec.structs.replace(self.record, ended=ended, reason=reason)
        key, alive_key = self.keys.participant(self.name), self.keys.alive(self.name)
        compares = (
            Compare(key, "mod", "=", self.registration_mod),
            Compare(alive_key, "create", "=", self.alive_create),
        )
        ops: tuple[Op, ...] = (put(key, record), Delete(alive_key), Delete(self.keys.route(self.name)))
        return self._apply(Txn(compares, ops), lambda: False) > 0
