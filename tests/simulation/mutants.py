"""The protocol broken on purpose: each mutant patches production code and must be found by the invariants."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from slackwater.engine import (
    boundary,
    bufferrole,
    decide,
    election,
    liveness,
    membership,
    recovery,
    retention,
    rounds,
    session,
    trainerrole,
    view,
    wishes,
)
from slackwater.engine.action import Action
from slackwater.engine.ports import Compare, Txn

from .faults import Schedule, draw, run

__all__ = ["MUTANTS", "hunt", "hunt_all", "mutated"]

Patch = list[tuple[Any, str, Any]]


def _without(action: Action | None, unwanted: Callable[[Compare], bool]) -> Action | None:
    if action is None:
        return None
    kept = tuple(compare for compare in action.compares if not unwanted(compare))
    return Action(action.name, kept, action.ops, action.log)


def _replaced(action: Action | None, **changes: Any) -> Action | None:
    if action is None:
        return None
    fields = {name: getattr(action, name) for name in ("name", "compares", "ops", "log")}
    return Action(**{**fields, **changes})


def _no_epoch() -> Patch:
    return [(election.Candidate, "guard", lambda self: Compare(self.key, "create", ">", -1))]


def _no_fences() -> Patch:
    return [(membership.Membership, "fences", lambda self: ())]


def _no_timeline_fence() -> Patch:
    original = membership.Membership.fences
    return [
        (
            membership.Membership,
            "fences",
            lambda self: tuple(c for c in original(self) if c.key != self.keys.timeline),
        )
    ]


def _no_alive_fence() -> Patch:
    original = membership.Membership.fences
    return [
        (
            membership.Membership,
            "fences",
            lambda self: tuple(c for c in original(self) if not c.key.startswith(self.keys.alives)),
        )
    ]


def _any_vote_counts() -> Patch:
    return [(rounds, "_counts", lambda round_, name, vote: True)]


def _voters_not_awaited() -> Patch:
    original = rounds._voted
    return [
        (
            rounds,
            "_voted",
            lambda view_, round_, states: original(view_, round_, ("ready", "saved", "sealed")),
        )
    ]


def _freeze_left_by_abort() -> Patch:
    original = rounds._close
    patched = lambda view_, round_: [op for op in original(view_, round_) if op.key != view_.keys.freeze]  # noqa: E731
    return [
        (rounds, "_close", patched),
        (rounds, "decide_round", _without_orphan()),
        (decide, "decide_round", _without_orphan()),
    ]


def _without_orphan() -> Callable[..., list[Action]]:
    original = rounds.decide_round

    def patched(*arguments: Any) -> list[Action]:
        return [action for action in original(*arguments) if action.name != "clear orphan freeze"]

    return patched


def _select_before_fence() -> Patch:
    def patched(view_: Any, record: Any, elapsed: float, config: Any) -> Action | None:
        trainer, buffer = view_.participant("trainer"), view_.participant("buffer")
        if trainer is None or buffer is None:
            return None
        return recovery._rewrite(
            view_,
            record,
            "fenced",
            phase="select",
            trainer=trainer.incarnation,
            buffer=buffer.incarnation,
            observed_s=0.0,
        )

    return [(recovery, "_fence", patched)]


def _lineage_ignored() -> Patch:
    def eligible(self: view.View) -> list[Any]:
        return [c for _, c in sorted(self.checkpoints().items(), reverse=True) if c.state != "deleting"]

    return [(view.View, "eligible", eligible)]


def _deleting_chosen() -> Patch:
    def eligible(self: view.View) -> list[Any]:
        lineage = self.lineage()
        return [
            c
            for n, c in sorted(self.checkpoints().items(), reverse=True)
            if c.timeline in lineage and n <= lineage[c.timeline][0]
        ]

    return [(view.View, "eligible", eligible)]


def _oldest_chosen() -> Patch:
    original = view.View.eligible
    return [(view.View, "eligible", lambda self: original(self)[::-1])]


def _no_hold_is_a_grant() -> Patch:
    original = trainerrole.TrainerRole.recovery_task

    def patched(self: Any, view_: Any) -> str:
        task = original(self, view_)
        return "go" if task == "wait" and self.membership.standing(view_) == "ours" else task

    return [(trainerrole.TrainerRole, "recovery_task", patched)]


def _no_lag_hold() -> Patch:
    return [(boundary, "_lag", lambda *arguments, **names: None)]


def _lease_from_reply() -> Patch:
    def renew(self: session.Session) -> None:
        while True:
            self.check()
            try:
                ttl = self._store.keep_alive(self._lease)
            except session.Unavailable:
                self.check()
                self._pause(0.1)
                continue
            if ttl <= 0:
                self._lose("gone")
            else:
                self._deadline = self._clock() + 2 * self.ttl_seconds
            self.check()
            return

    return [(session.Session, "renew", renew)]


def _never_lost() -> Patch:
    return [(session.Session, "alive", lambda self: self._lease != 0 and not self._closed)]


def _commit_unguarded() -> Patch:
    original = rounds.commit
    return [
        (
            rounds,
            "commit",
            lambda view_, round_, seal: _replaced(original(view_, round_, seal), compares=()),
        )
    ]


def _commit_before_seal() -> Patch:
    original = rounds._save

    def patched(view_: Any, round_: Any, elapsed: float, config: Any) -> Any:
        vote = view_.votes(round_.round).get("trainer")
        if vote is not None and vote.state == "saved":
            return rounds.commit(view_, round_, vote)
        return original(view_, round_, elapsed, config)

    return [(rounds, "_save", patched)]


def _id_at_prepare() -> Patch:
    from slackwater.engine.action import put
    from slackwater.engine.model import CheckpointHead

    original = rounds.next_round

    def patched(view_: Any, config: Any, last: Any, *rest: Any) -> Any:
        action = original(view_, config, last, *rest)
        head = put(view_.keys.checkpoint_head, CheckpointHead(checkpoint=last.round + 1))
        return _replaced(action, ops=(*action.ops, head))

    return [(rounds, "next_round", patched), (wishes, "next_round", patched)]


def _route_without_proof() -> Patch:
    from .parts import EngineClient, Proof

    return [(EngineClient, "prove", lambda self, label: Proof(label, 1, 0))]


def _publication_ignores_freeze() -> Patch:
    original = membership.Membership.write

    def patched(self: Any, ops: Any, compares: Any = (), landed: Any = lambda: False) -> bool:
        kept = [c for c in compares if c.key != self.keys.freeze]
        return original(self, ops, kept, landed)

    originals = boundary._boundary

    def direct(view_: Any, me: Any, config: Any, limit: int) -> Any:
        if view_.freeze is not None and me.step > me.published_step and not me.refused:
            return boundary.Directive("publish")
        return originals(view_, me, config, limit)

    return [(membership.Membership, "write", patched), (boundary, "_boundary", direct)]


def _head_not_compared() -> Patch:
    original = membership.Membership.write

    def patched(self: Any, ops: Any, compares: Any = (), landed: Any = lambda: False) -> bool:
        kept = [c for c in compares if not c.key.startswith(self.keys.weights)]
        return original(self, ops, kept, landed)

    return [(membership.Membership, "write", patched)]


def _lost_reply_is_a_no() -> Patch:
    original = membership.Membership._apply

    def patched(self: Any, txn: Txn, landed: Any) -> int:
        return original(self, txn, lambda: False)

    return [(membership.Membership, "_apply", patched), (trainerrole.TrainerRole, "_is", lambda *a: False)]


def _buffer_not_fenced() -> Patch:
    from .parts import SimBuffer

    return [
        (SimBuffer, "fence", lambda self, timeline, incarnation="": None),
        (SimBuffer, "_admit", lambda self, timeline, incarnation: None),
    ]


def _buffer_fence_skipped() -> Patch:
    def patched(self: Any, view_: Any, found: Any) -> None:
        buffer = self.buffer
        fence, self.buffer.fence = buffer.fence, lambda *a, **k: None
        try:
            original(self, view_, found)
        finally:
            buffer.fence = fence

    original = bufferrole.BufferRole._recover
    return [(bufferrole.BufferRole, "_recover", patched)]


def _newest_marked() -> Patch:
    def patched(records: Any, lineage: Any, keep_last: int, in_use: Any) -> list[int]:
        return sorted(record.checkpoint for record in records)

    return [(retention, "expendable", patched)]


def _uploads_marked() -> Patch:
    original = retention.expendable
    return [
        (retention, "expendable", lambda records, lineage, keep, in_use: original(records, lineage, 1, ()))
    ]


def _routes_survive_fence() -> Patch:
    return _fence_keeps("routes")


def _freeze_survives_fence() -> Patch:
    return _fence_keeps("freeze")


def _rounds_survive_fence() -> Patch:
    return _fence_keeps("rounds")


def _go_survives_fence() -> Patch:
    return _fence_keeps("go")


def _fence_keeps(what: str) -> Patch:
    original = recovery.fence

    def patched(view_: Any, cause: str, target: int = 0, request: str = "") -> Any:
        action = original(view_, cause, target, request)
        key = getattr(view_.keys, what)
        return _replaced(action, ops=tuple(op for op in action.ops if op.key != key))

    return [(recovery, "fence", patched), (wishes, "fence", patched)]


def _trainer_loss_ignored() -> Patch:
    original = recovery._cause

    def patched(view_: Any, config: Any) -> str:
        cause = original(view_, config)
        return "" if cause == "a new trainer registered" else cause

    return [(recovery, "_cause", patched)]


def _go_for_anyone() -> Patch:
    original = recovery._freshness

    def patched(view_: Any, record: Any, elapsed: float, config: Any) -> Any:
        trainer = view_.participant("trainer")
        action = original(view_, record, elapsed, config)

        def unwanted(c):
            return c.key in (view_.keys.participant("trainer"), view_.keys.recovery, view_.keys.timeline)

        return _without(action, unwanted) if trainer is not None else action

    return [(recovery, "_freshness", patched)]


def _voters_without_routes() -> Patch:
    original = rounds._fix_voters

    def patched(view_: Any, round_: Any, freeze: Any, config: Any) -> Any:
        action = original(view_, round_, freeze, config)
        first = action.ops[0]
        record = msgspec.json.decode(first.value)
        record["voters"] = {n: i for n, i in record["voters"].items() if not n.startswith("rollout")}
        return _replaced(
            action,
            ops=(
                msgspec.structs.replace(first)
                if False
                else type(first)(first.key, msgspec.json.encode(record)),
                *action.ops[1:],
            ),
        )

    return [(rounds, "_fix_voters", patched)]


def _no_min_rollouts() -> Patch:
    return [(decide, "_hold_min_rollouts", lambda view_, config: [])]


def _failed_beats_return() -> Patch:
    original = liveness._verdict
    return [(liveness, "_verdict", lambda *arguments: _without(original(*arguments), lambda c: True))]


def _skipped_ignored() -> Patch:
    original = recovery._select

    def patched(view_: Any, record: Any, elapsed: float, config: Any) -> Any:
        return original(view_, msgspec.structs.replace(record, skipped={}), elapsed, config)

    return [(recovery, "_select", patched)]


MUTANTS: dict[str, Callable[[], Patch]] = {
    name[1:]: found
    for name, found in list(globals().items())
    if name.startswith("_")
    and callable(found)
    and getattr(found, "__annotations__", {}).get("return") == "Patch"
    and name != "_fence_keeps"
}
"""Each gives the patches (object, attribute, value) that break one rule."""


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Break one rule for a while."""
    patches = MUTANTS[name]()
    saved = [(target, attribute, target.__dict__[attribute]) for target, attribute, _ in patches]
    for target, attribute, value in patches:
        setattr(target, attribute, value)
    try:
        yield
    finally:
        for target, attribute, value in saved:
            setattr(target, attribute, value)


def hunt(name: str, seconds: float, first_seed: int = 100_000) -> tuple[Schedule, str] | None:
    """Look for a schedule that shows the mutant; None when time ran out."""
    end = time.monotonic() + seconds
    seed = first_seed
    with mutated(name):
        while time.monotonic() < end:
            schedule = draw(seed)
            problems = run(schedule).kernel.problems
            if problems:
                return schedule, problems[0]
            seed += 1
    return None


def hunt_all(seconds_each: float = 60.0) -> tuple[int, int]:
    """(mutants caught, mutants)."""
    found = sum(hunt(name, seconds_each) is not None for name in MUTANTS)
    return found, len(MUTANTS)
