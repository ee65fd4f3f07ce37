"""The protocol broken on purpose: each mutant patches production code and must be found by the invariants."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from slackwater.engine import (
    beat,
    boundary,
    bufferrole,
    coordinator,
    decide,
    election,
    liveness,
    membership,
    recovery,
    retention,
    rolloutrole,
    rounds,
    session,
    stepmap,
    trainerrole,
    view,
    wishes,
)
from slackwater.engine.action import Action
from slackwater.engine.engineport import Proof
from slackwater.engine.model import Ack
from slackwater.engine.ports import Compare, Txn

from .directed import DIRECTED
from .faults import Schedule, draw, run

__all__ = ["EQUIVALENT", "MUTANTS", "hunt", "hunt_all", "mutated", "schedule_of"]

Patch = list[tuple[Any, str, Any]]
SEEDS: dict[str, int] = json.loads(Path(__file__).with_name("seeds.json").read_text())


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
                self._deadline = self._clock() + self.ttl_seconds
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
    original = rolloutrole.RolloutRole._load

    class Unproven:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def prove(self, label: str) -> Proof:
            return Proof(label, 1, 0)

    def patched(self: Any, record: Any, image: Any) -> None:
        engine, self.engine = self.engine, Unproven(self.engine)
        try:
            original(self, record, image)
        finally:
            self.engine = engine

    return [(rolloutrole.RolloutRole, "_load", patched)]


def _publication_ignores_freeze() -> Patch:
    original = membership.Membership.write

    def patched(self: Any, ops: Any, compares: Any = (), landed: Any = lambda: False, **more: Any) -> bool:
        kept = [c for c in compares if c.key != self.keys.freeze]
        return original(self, ops, kept, landed, **more)

    originals = boundary._boundary

    def direct(view_: Any, me: Any, config: Any, limit: int) -> Any:
        if view_.freeze is not None and me.step > me.published_step and not me.refused:
            return boundary.Directive("publish")
        return originals(view_, me, config, limit)

    return [(membership.Membership, "write", patched), (boundary, "_boundary", direct)]


def _head_not_compared() -> Patch:
    original = membership.Membership.write

    def patched(self: Any, ops: Any, compares: Any = (), landed: Any = lambda: False, **more: Any) -> bool:
        kept = [c for c in compares if not c.key.startswith(self.keys.weights)]
        return original(self, ops, kept, landed, **more)

    return [(membership.Membership, "write", patched)]


def _lost_reply_is_a_no() -> Patch:
    original = membership.Membership._apply

    def patched(self: Any, txn: Txn, landed: Any, **more: Any) -> int:
        return original(self, txn, lambda: False)

    return [(membership.Membership, "_apply", patched), (trainerrole.TrainerRole, "_is", lambda *a: False)]


def _in_flight_is_a_no() -> Patch:
    return [(trainerrole.TrainerRole, "_rule_out", lambda self: None)]


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

    def patched(view_: Any, *rest: Any) -> Any:
        return _without(original(view_, *rest), lambda compare: compare.key != view_.keys.go)

    return [(recovery, "_freshness", patched)]


def _voters_without_routes() -> Patch:
    original = rounds._fix_voters

    def patched(view_: Any, round_: Any, freeze: Any, config: Any) -> Any:
        action = original(view_, round_, freeze, config)
        first = action.ops[0]
        record = msgspec.json.decode(first.value)
        record["voters"] = {n: i for n, i in record["voters"].items() if not n.startswith("rollout")}
        first = type(first)(first.key, msgspec.json.encode(record))
        return _replaced(action, ops=(first, *action.ops[1:]))

    return [(rounds, "_fix_voters", patched)]


def _no_min_rollouts() -> Patch:
    return [(decide, "_hold_min_rollouts", lambda view_, config: [])]


def _failed_beats_return() -> Patch:
    original = liveness._verdict

    def patched(view_: Any, *rest: Any) -> Any:
        return _without(original(view_, *rest), lambda compare: compare.key.startswith(view_.keys.alives))

    return [(liveness, "_verdict", patched)]


def _skipped_ignored() -> Patch:
    original = recovery._select

    def patched(view_: Any, record: Any, elapsed: float, config: Any) -> Any:
        return original(view_, msgspec.structs.replace(record, skipped={}), elapsed, config)

    return [(recovery, "_select", patched)]


def _no_registration_fence() -> Patch:
    original = membership.Membership.fences
    return [
        (
            membership.Membership,
            "fences",
            lambda self: tuple(c for c in original(self) if not c.key.startswith(self.keys.participants)),
        )
    ]


def _orphan_freeze_kept() -> Patch:
    patched = _without_orphan()
    return [(rounds, "decide_round", patched), (decide, "decide_round", patched)]


def _attempts_unlimited() -> Patch:
    return [(recovery, "MAX_ATTEMPTS", 1 << 30)]


def _back_after_failed() -> Patch:
    return [(beat, "_failed", lambda kv, incarnation: False)]


def _ack_of_older_recovery() -> Patch:
    def patched(view_: Any, record: Any, name: str, phase: str) -> Any:
        found = view_.under(view_.keys.all_acks, Ack)
        ack = next((a for key, a in found.items() if key.endswith(f"/{name}")), None)
        registered = view_.participant(name)
        if ack is None or registered is None or ack.incarnation != registered.incarnation:
            return None
        return ack if recovery._ORDER.index(ack.phase) >= recovery._ORDER.index(phase) else None

    return [(recovery, "_ack", patched), *_fence_keeps("all_acks")]


def _dropped_keeps_route() -> Patch:
    original = rounds._drop

    def patched(view_: Any, round_: Any, late: Any, extra: Any) -> Any:
        action = original(view_, round_, late, extra)
        return _replaced(action, ops=action.ops[:1])

    return [(rounds, "_drop", patched)]


def _voters_follow_votes() -> Patch:
    original = rounds._ready

    def patched(view_: Any, round_: Any, elapsed: float, config: Any) -> Any:
        voted = {"trainer", "buffer", *view_.votes(round_.round)}
        voters = {n: i for n, i in round_.voters.items() if n in voted}
        return original(view_, msgspec.structs.replace(round_, voters=voters), elapsed, config)

    return [(rounds, "_ready", patched)]


def _voters_recomputed() -> Patch:
    original = rounds._ready

    def patched(view_: Any, round_: Any, elapsed: float, config: Any) -> Any:
        names = ["trainer", "buffer", *view_.routes()]
        registered = view_.participants()
        voters = {name: registered[name].incarnation for name in names if name in registered}
        return original(view_, msgspec.structs.replace(round_, voters=voters), elapsed, config)

    return [(rounds, "_ready", patched)]


def _vote_without_token() -> Patch:
    return _write_without(lambda self, compare: compare.key == self.keys.round)


def _write_without(unwanted: Callable[[Any, Compare], bool]) -> Patch:
    original = membership.Membership.write

    def patched(self: Any, ops: Any, compares: Any = (), landed: Any = lambda: False, **more: Any) -> bool:
        return original(self, ops, [c for c in compares if not unwanted(self, c)], landed, **more)

    return [(membership.Membership, "write", patched)]


def _silence_not_persisted() -> Patch:
    return [(liveness, "_observe", lambda *arguments: None)]


def _massacre() -> Patch:
    return [(liveness, "mass_silence", lambda view_: False)]


def _label_not_read() -> Patch:
    original = rolloutrole.RolloutRole._compare

    def patched(self: Any, status: Any) -> None:
        original(self, dataclasses.replace(status, label=self.label))

    return [(rolloutrole.RolloutRole, "_compare", patched)]


def _stall_ignored() -> Patch:
    return [(liveness, "_judge_progress", lambda *arguments: None)]


def _deadlines_ignored() -> Patch:
    original = rounds._ready

    def patched(view_: Any, round_: Any, elapsed: float, config: Any) -> Any:
        return original(view_, round_, 0.0, config)

    return [(rounds, "_ready", patched)]


def _mark_unguarded() -> Patch:
    original = retention.decide_retention

    def patched(view_: Any, config: Any) -> list[Action]:
        found = original(view_, config)
        return [_replaced(a, compares=()) if a.name.startswith("mark") else a for a in found]

    return [(decide, "decide_retention", patched)]


def _step_map_for_the_fleet_only() -> Patch:
    original = stepmap._referred
    return [
        (stepmap, "_referred", lambda v: original(v) - {c.weight_version for c in v.checkpoints().values()})
    ]


def _step_map_without_samples() -> Patch:
    original = stepmap.expendable_versions
    return [
        (
            stepmap,
            "expendable_versions",
            lambda versions, referred, keep, _: original(versions, referred, keep, 0),
        )
    ]


def _history_untold() -> Patch:
    return [(coordinator.Coordinator, "_entry", lambda self, view_, action: None)]


def _routes_not_compared() -> Patch:
    original = rounds._fix_voters

    def patched(view_: Any, *rest: Any) -> Any:
        return _without(original(view_, *rest), lambda compare: compare.key == view_.keys.routes)

    return [(rounds, "_fix_voters", patched)]


MUTANTS: dict[str, Callable[[], Patch]] = {
    name[1:]: found
    for name, found in list(globals().items())
    if name.startswith("_")
    and callable(found)
    and getattr(found, "__annotations__", {}).get("return") == "Patch"
    and name not in ("_fence_keeps", "_write_without")
}
"""Each gives the patches (object, attribute, value) that break one rule."""


EQUIVALENT: dict[str, str] = {
    "intent_ignored": "an intent stands only while nothing is proven, and a new life proves by a full load anyway: "
    "what a pending intent forbids (`_clean`) is forbidden already by `proven = 0` until `done`",
    "create_not_compared": "`create(weights/version/<v>) = 0` says nothing that `mod(weights/head)` does not: "
    "both keys are written in one transaction only, and no version above the head exists",
    "route_ignores_head": "a route for an older version of this timeline stays a proven, loadable one (I7), and the "
    "voters are fixed under a range compare of the routes (`routes_not_compared`)",
}
"""Rules whose loss cannot show, because another one covers them: they stay as a second line, and are no mutants."""


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


def schedule_of(name: str, seed: int) -> Schedule:
    """The schedule that shows a mutant at a seed: made for it, or drawn."""
    return DIRECTED[name](seed) if name in DIRECTED else draw(seed)


def hunt(name: str, seconds: float, first_seed: int | None = None) -> tuple[Schedule, str] | None:
    """Look for a schedule that shows the mutant and that the sound protocol passes; None when time ran out.

    Without `first_seed` the recorded seed is tried first.
    """
    end = time.monotonic() + seconds
    first = first_seed if first_seed is not None else (1 if name in DIRECTED else 100_000)
    known = [] if first_seed is not None else [SEEDS[name]] if name in SEEDS else []
    for seed in itertools.chain(known, itertools.count(first)):
        if time.monotonic() > end:
            break
        schedule = schedule_of(name, seed)
        with mutated(name):
            problems = run(schedule).kernel.problems
        if problems and not run(schedule).kernel.problems:
            return schedule, problems[0]
    return None


def hunt_all(seconds_each: float = 60.0) -> tuple[list[str], float]:
    """(names of the mutants that nobody noticed within `seconds_each`, seconds that all hunts took together)."""
    begun = time.monotonic()
    missed = [name for name in MUTANTS if hunt(name, seconds_each) is None]
    return missed, time.monotonic() - begun
