"""The trainer's side of the protocol, for rank 0: what to do next, and the transactions that do it.

No thread and no tensor in here. The adapter asks `recovery_task` until training may begin, `directive` at the end of
each step, `round_task` while a round is open, and tells what it has done.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Literal

from .action import put
from .boundary import Directive, TrainerState, direct
from .config import JobConfig
from .errors import LeaseLost, NoSpace, Unavailable
from .membership import Membership
from .model import Ack, Alive, Freeze, ParticipantState, Upload, Vote, WeightHead, WeightVersion, decode
from .ports import Compare, Op, Put, StateStore
from .view import View

__all__ = ["RecoveryTask", "RoundTask", "TrainerRole"]

RecoveryTask = Literal["wait", "acknowledge", "restore", "publish", "go", "over"]
RoundTask = Literal["none", "ready", "save", "seal"]


class TrainerRole:
    """One incarnation of the trainer. Not thread-safe, but for `vote` and `upload`, which only write.

    `step` counts optimizer updates; `published_step` is the step of the last version accepted on this timeline.
    """

    def __init__(self, store: StateStore, membership: Membership, config: JobConfig) -> None:
        self._store = store
        self.membership = membership
        self.config = config
        self.step = 0
        self.published_step = -1
        self.refused_step = -1
        self.refusals = 0
        self.state: ParticipantState = "idle"
        self._unsettled: tuple[str, bytes] | None = None  # key and value of a publication of unknown outcome

    # -- what to do ----------------------------------------------------------------------------------------

    def recovery_task(self, view: View) -> RecoveryTask:
        """What the open recovery wants from the trainer now. "go": training may begin; "over": this life is over."""
        me = self.membership
        standing = me.standing(view)
        if standing == "replaced":
            return "over"
        recovery = view.recovery
        if recovery is None:
            go = view.go
            granted = go is not None and go.incarnation == me.incarnation and go.timeline == me.timeline
            return "go" if granted and standing == "ours" else "wait"
        ack = view.acks(recovery.recovery).get(me.name)
        if ack is None or ack.incarnation != me.incarnation or me.timeline != recovery.recovery:
            # No answer yet, or it was taken back so that the next checkpoint can be tried.
            return "acknowledge"
        if recovery.phase == "restore" and (ack.phase == "fence" or ack.checkpoint != recovery.checkpoint):
            return "restore"
        head = view.head
        if recovery.phase == "resync" and (head is None or head.timeline != recovery.recovery):
            return "publish"
        return "wait"

    def directive(self, view: View) -> Directive:
        """The directive for the end of the current step."""
        me = self.membership
        state = TrainerState(
            incarnation=me.incarnation,
            timeline=me.timeline,
            step=self.step,
            published_step=self.published_step,
            session_alive=me.beat.alive(),
            standing="replaced" if me.beat.lost else me.standing(view),
            refused=self.refused_step == self.step,
        )
        return direct(view, state, self.config)

    def round_task(self, view: View) -> RoundTask:
        """What the open round wants of this incarnation.

        "ready": say that the snapshot is taken; "save": say it once all files are written; "seal": the manifest.
        """
        round_, me = view.round, self.membership
        if round_ is None or round_.voters.get(me.name) != me.incarnation or round_.timeline != me.timeline:
            return "none"
        vote = view.votes(round_.round).get(me.name)
        if vote is not None and vote.state == "failed":
            return "none"
        if round_.phase == "seal" and (vote is None or vote.state != "sealed"):
            return "seal"
        if round_.phase not in ("ready", "save"):
            return "none"
        if vote is None:
            return "ready"
        return "save" if vote.state == "ready" else "none"

    # -- recovery ------------------------------------------------------------------------------------------

    def acknowledge(self, view: View, found_data: str = "") -> None:
        """Move to the recovery's timeline. `found_data`: where a `committed.json` of this job lies, if anywhere."""
        recovery = view.recovery
        if recovery is None:
            return
        ack = Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence", found_data=found_data)
        self.membership.acknowledge(view, ack)
        self.published_step = self.refused_step = -1

    def restored(self, recovery: int, checkpoint: int, step: int, report: dict[str, Any]) -> None:
        """Say that this gang holds the checkpoint's state (0: the state it was born with) at `step`."""
        self.step = step
        self.published_step = self.refused_step = -1  # nothing of this state is published yet
        ack = Ack(
            recovery=recovery,
            name="",
            incarnation="",
            phase="restore",
            checkpoint=checkpoint,
            step=step,
            report=report,
        )
        self.membership.acknowledge_phase(ack)

    def restore_failed(self, recovery: int, checkpoint: int, error: str, *, unverified: bool) -> None:
        """Say that it could not be restored; `unverified`: its bytes are wrong or missing, so try an older one."""
        ack = Ack(
            recovery=recovery,
            name="",
            incarnation="",
            phase="restore",
            checkpoint=checkpoint,
            ok=False,
            unverified=unverified,
            error=error[:1000],
        )
        self.membership.acknowledge_phase(ack)

    # -- publication ---------------------------------------------------------------------------------------

    def publish(
        self,
        view: View,
        *,
        location: str,
        digest: str,
        size_bytes: int,
        attempt: str,
        cut: Directive | None = None,
        path: str = "",
    ) -> WeightVersion | None:
        """Publish the weights of the current step as the next version, and with `cut` set the freeze at once.

        None when it was refused (frozen, or somebody else was faster): retried at the next boundary, and counted.
        Raises `LeaseLost` (nothing was sent), `NoSpace` (refused, and counted), or `Unavailable`: then call `settle`
        until it answers, before the next update of the weights.
        """
        keys, me = self.membership.keys, self.membership
        head = view.head or WeightHead(version=0, step=0, timeline=0)
        if cut is not None and head.timeline == me.timeline and head.step == self.step:
            return self._freeze_only(view, head, cut, path)
        version = head.version + 1
        record = WeightVersion(
            version=version,
            step=self.step,
            timeline=me.timeline,
            location=location,
            digest=digest,
            size_bytes=size_bytes,
            attempt=attempt,
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )
        key = keys.weight_version(version)
        compares = [
            Compare(keys.freeze, "create", "=", 0),
            view.same(keys.weight_head),
            Compare(key, "create", "=", 0),
        ]
        ops: list[Put] = [
            put(keys.weight_head, WeightHead(version=version, step=self.step, timeline=me.timeline)),
            put(key, record),
        ]
        if cut is not None:
            compares.append(Compare(keys.round, "create", "=", cut.token))
            ops.append(put(keys.freeze, self._freeze(cut, version, path)))

        def landed() -> bool:
            kv = self._store.get(key)
            return kv is not None and decode(WeightVersion, kv.value, key).attempt == attempt

        if not self._write(ops[1], ops, compares, landed):
            return None
        return record

    def _write(
        self, proof: Put, ops: Sequence[Op], compares: Sequence[Compare], landed: Callable[[], bool]
    ) -> bool:
        """Send a publication. While its outcome is unknown `proof` is the key and value to look for."""
        self._unsettled = (proof.key, proof.value)
        try:
            done = self.membership.write(ops, compares, landed, final=True)
        except LeaseLost:
            self._unsettled = None
            raise
        except NoSpace:
            self._unsettled = None  # nothing of it is on its way
            self._settled(False)
            raise
        self._unsettled = None
        self._settled(done)
        return done

    def _settled(self, done: bool) -> None:
        if done:
            self.published_step = self.step
        else:
            self.refusals += 1
            self.refused_step = self.step

    @property
    def unsettled(self) -> bool:
        """Whether the outcome of our last publication is still unknown."""
        return self._unsettled is not None

    def settle(self) -> bool:
        """Find out about a publication of unknown outcome; True when it was accepted. Raises `Unavailable`.

        False is final: a copy that is still on its way will be refused, so its image may go.
        """
        if self._unsettled is None:
            return False
        key, value = self._unsettled
        done = self._is(key, value)
        if not done:
            self._rule_out()
            done = self._is(key, value)
        self._unsettled = None
        self._settled(done)
        return done

    def _rule_out(self) -> None:
        """Write the head as it is: every publication compares its revision, so that one sent before cannot land."""
        me, key = self.membership, self.membership.keys.weight_head
        head = self._store.get(key)
        same = (
            Put(key, head.value) if head is not None else put(key, WeightHead(version=0, step=0, timeline=0))
        )
        guard = Compare(key, "mod", "=", head.mod_revision if head is not None else 0)
        try:
            # Refused: a copy landed meanwhile, or our fences do not hold any more, and those of the copy neither.
            me.write([same], [guard])
        except (LeaseLost, NoSpace) as error:
            raise Unavailable(f"{me.name}: a publication cannot be ruled out yet: {error}") from error

    def _freeze_only(self, view: View, head: WeightHead, cut: Directive, path: str) -> WeightVersion | None:
        """A trainer without an update since the head was published is at its boundary already."""
        keys = self.membership.keys
        freeze = put(keys.freeze, self._freeze(cut, head.version, path))
        compares = (
            Compare(keys.freeze, "create", "=", 0),
            Compare(keys.round, "create", "=", cut.token),
            view.same(keys.weight_head),
        )

        def landed() -> bool:
            kv = self._store.get(keys.freeze)
            return kv is not None and kv.value == freeze.value

        if not self._write(freeze, [freeze], compares, landed):
            return None
        return view.weight_version(head.version)

    def _freeze(self, cut: Directive, version: int, path: str) -> Freeze:
        return Freeze(round=cut.round, token=cut.token, step=self.step, version=version, path=path)

    # -- votes and uploads ---------------------------------------------------------------------------------

    def vote(self, token: int, vote: Vote) -> bool:
        """Cast or raise our vote in the round whose key was created at `token`; False when that round is closed."""
        keys = self.membership.keys
        op = put(keys.vote(vote.round, self.membership.name), vote)
        return self.membership.write(
            [op], [Compare(keys.round, "create", "=", token)], lambda: self._is(op.key, op.value)
        )

    def upload(self, upload: Upload) -> bool:
        """Write an upload's progress; False when this incarnation or timeline is over."""
        op = put(self.membership.keys.upload(upload.checkpoint, upload.incarnation), upload)
        return self.membership.write([op], (), lambda: self._is(op.key, op.value))

    def _is(self, key: str, value: bytes) -> bool:
        kv = self._store.get(key)
        return kv is not None and kv.value == value

    def report(
        self, view: View | None = None, *, waits_for: str = "", metrics: dict[str, float] | None = None
    ) -> None:
        """Tell the beat what we are doing."""
        head = view.head if view is not None else None
        self.membership.report(
            Alive(
                incarnation=self.membership.incarnation,
                state=self.state,
                training_step=self.step,
                weight_version=head.version if head is not None else 0,
                waits_for=waits_for,
                metrics=metrics or {},
            )
        )
