"""Recovery k is the timeline that it creates: fence -> select -> restore -> resync -> freshness -> resume. Pure.

Each phase is in etcd, so any leader can go on with it. A job's start is recovery 1 from nothing, so that the trainer
never takes a step without a grant, not even the first.
"""

from __future__ import annotations

import msgspec

from .action import Action, delete, put
from .config import JobConfig
from .keys import BUFFER, TRAINER
from .liveness import is_failed
from .model import Ack, Go, Lineage, Recovery, Request, Timeline, WeightHead
from .ports import Compare, Op
from .view import FirstSeen, View

__all__ = ["MAX_ATTEMPTS", "decide_recovery", "fence"]

MAX_ATTEMPTS = 3


def decide_recovery(view: View, seen: FirstSeen, now: float, config: JobConfig) -> list[Action]:
    """Begin a recovery when its cause is there, or move the open one on by one phase."""
    cause = _cause(view, config)
    if cause:
        return [fence(view, cause)]
    recovery = view.recovery
    if recovery is None or recovery.recovery != view.timeline:
        return []
    key = view.keys.recovery
    since = seen.elapsed(key, view.mod(key), now)
    elapsed = recovery.observed_s + since
    phase = {
        "fence": _fence,
        "select": _select,
        "restore": _restore,
        "resync": _resync,
        "freshness": _freshness,
        "needs_operator": _wait,
    }[recovery.phase]
    action = phase(view, recovery, elapsed, config)
    if action is None and since >= config.timers.persist_s and recovery.phase != "needs_operator":
        action = _rewrite(view, recovery, "observe recovery", observed_s=round(elapsed, 3))
    return [] if action is None else [action]


# -- causes ------------------------------------------------------------------------------------------------


def _cause(view: View, config: JobConfig) -> str:
    """Why the job must be brought back to one point, or "" when it need not."""
    recovery = view.recovery
    trainer, buffer = view.participant(TRAINER), view.participant(BUFFER)
    if recovery is not None:
        # Only a slot that had already answered this recovery can spoil it by changing.
        if recovery.trainer and trainer is not None and trainer.incarnation != recovery.trainer:
            return "the trainer was replaced during a recovery"
        if recovery.buffer and buffer is not None and buffer.incarnation != recovery.buffer:
            return "the buffer was replaced during a recovery"
        return ""
    go = view.go
    if trainer is None:
        return ""
    if is_failed(view, TRAINER):
        health = view.health(TRAINER)
        return f"the trainer failed: {health.evidence if health is not None else ''}"
    if go is None:
        return "" if trainer.ended == "left" else "the trainer has no grant and no recovery is open"
    if go.incarnation != trainer.incarnation:
        return "a new trainer registered"
    if trainer.ended == "left" or not config.slots.buffer or buffer is None:
        return ""
    if is_failed(view, BUFFER) or buffer.incarnation != go.buffer:
        step = view.alive(TRAINER)
        reached = step.training_step if step is not None else go.from_step
        if is_failed(view, BUFFER) or buffer.covers_step < reached:
            return f"the buffer was lost and its log does not reach step {reached}"
    return ""


def fence(view: View, cause: str, target: int = 0, request: str = "") -> Action:
    """The transaction that ends a timeline: after it no older incarnation has any effect on the job."""
    keys = view.keys
    old = view.record(keys.timeline_record(view.timeline), Lineage)
    timeline = view.timeline + 1
    # A timeline that never selected a checkpoint has no state; its child hangs on its parent.
    parent = view.timeline if old is None or old.selected else old.parent
    head = view.head or WeightHead(version=0, step=0, timeline=0)
    previous = view.recovery
    attempts = previous.attempts + 1 if previous is not None and previous.checkpoint and not target else 0
    # What an operator names now was not tried for this wish: an older verdict on it does not count.
    skipped = dict(previous.skipped) if previous is not None and not target else {}
    if previous is not None and not target:
        # The operator's wish survives a trainer that dies while it is being granted.
        target, request = previous.target, previous.request
    lineage = Lineage(timeline=timeline, parent=parent, head_at_fence=head.version, cause=cause, at=view.at)
    record = Recovery(
        recovery=timeline,
        cause=cause,
        at=view.at,
        target=target,
        request=request,
        attempts=attempts,
        checkpoint=previous.checkpoint if previous is not None else 0,
        skipped=skipped,
    )
    compares = (view.same(keys.timeline), view.same(keys.recovery), view.same(keys.participant(TRAINER)))
    ops: tuple[Op, ...] = (
        put(keys.timeline, Timeline(timeline=timeline)),
        put(keys.timeline_record(timeline), lineage),
        put(keys.recovery, record),
        delete(keys.freeze),
        delete(keys.go),
        delete(keys.rounds, prefix=True),
        delete(keys.routes, prefix=True),
        delete(keys.all_acks, prefix=True),
    )
    text = f"recovery {timeline} begins: {cause}"
    return Action(
        f"fence {timeline}", compares, ops, ("recovery", text, {"recovery": timeline, "phase": "fence"})
    )


# -- phases ------------------------------------------------------------------------------------------------


def _fence(view: View, recovery: Recovery, elapsed: float, config: JobConfig) -> Action | None:
    """Wait until trainer and buffer have answered on the new timeline; for the trainer there is no deadline."""
    trainer = _ack(view, recovery, TRAINER, "fence")
    buffer = _ack(view, recovery, BUFFER, "fence") if config.slots.buffer else None
    if trainer is None or (config.slots.buffer and buffer is None):
        return None
    return _rewrite(
        view,
        recovery,
        "fenced",
        phase="select",
        trainer=trainer.incarnation,
        buffer=buffer.incarnation if buffer is not None else "",
        observed_s=0.0,
    )


def _select(view: View, recovery: Recovery, elapsed: float, config: JobConfig) -> Action | None:
    records = view.checkpoints()
    eligible = view.eligible()
    if recovery.target:
        eligible = [record for record in eligible if record.checkpoint == recovery.target]
        if not eligible:
            return _needs_operator(
                view, recovery, f"checkpoint {recovery.target} is not on the lineage or is gone"
            )
    chosen = next((record for record in eligible if str(record.checkpoint) not in recovery.skipped), None)
    if chosen is None:
        return _select_nothing(view, recovery, bool(records))
    attempts = recovery.attempts if chosen.checkpoint == recovery.checkpoint else 0
    if attempts >= MAX_ATTEMPTS:
        return _needs_operator(
            view, recovery, f"{attempts} attempts on checkpoint {chosen.checkpoint} failed"
        )
    if attempts and elapsed < config.timers.retry_wait_s * 2 ** (attempts - 1):
        return None
    lineage = view.record(view.keys.timeline_record(recovery.recovery), Lineage)
    return _selected(view, recovery, lineage, chosen.checkpoint, chosen.weight_version, attempts)


def _select_nothing(view: View, recovery: Recovery, had_records: bool) -> Action | None:
    """Start from nothing only when there never was anything: no record, and no `committed.json` on any tier."""
    ack = view.acks(recovery.recovery).get(TRAINER)
    if had_records:
        reasons = "; ".join(f"{number}: {why}" for number, why in recovery.skipped.items())
        return _needs_operator(
            view, recovery, f"no checkpoint can be restored ({reasons or 'none on the lineage'})"
        )
    if ack is not None and ack.found_data:
        text = f"etcd has no checkpoint, but {ack.found_data} exists: use `slackwater rebuild`, or another job name"
        return _needs_operator(view, recovery, text)
    lineage = view.record(view.keys.timeline_record(recovery.recovery), Lineage)
    return _selected(view, recovery, lineage, 0, 0, recovery.attempts)


def _selected(
    view: View, recovery: Recovery, lineage: Lineage | None, checkpoint: int, version: int, attempts: int
) -> Action:
    keys = view.keys
    lineage = lineage or Lineage(timeline=recovery.recovery, parent=0)
    record = msgspec.structs.replace(lineage, selected=True, from_checkpoint=checkpoint, from_version=version)
    extra = [view.same(keys.timeline_record(recovery.recovery))]
    if checkpoint:
        # A checkpoint that is being deleted must not be chosen: its record is as we read it.
        extra.append(view.same(keys.checkpoint(checkpoint)))
    return _rewrite(
        view,
        recovery,
        f"select {checkpoint}",
        tuple(extra),
        (put(keys.timeline_record(recovery.recovery), record),),
        phase="restore",
        checkpoint=checkpoint,
        attempts=attempts,
        observed_s=0.0,
    )


def _restore(view: View, recovery: Recovery, elapsed: float, config: JobConfig) -> Action | None:
    names = [TRAINER, *([BUFFER] if config.slots.buffer else [])]
    acks = {name: _ack(view, recovery, name, "restore") for name in names}
    for name, ack in acks.items():
        if ack is not None and not ack.ok:
            return _restore_failed(view, recovery, name, ack)
    if any(ack is None or ack.checkpoint != recovery.checkpoint for ack in acks.values()):
        return None
    return _rewrite(view, recovery, "restored", phase="resync", observed_s=0.0)


def _restore_failed(view: View, recovery: Recovery, name: str, ack: Ack) -> Action:
    clear = (
        delete(view.keys.ack(recovery.recovery, TRAINER)),
        delete(view.keys.ack(recovery.recovery, BUFFER)),
    )
    reason = f"{name}: {ack.error}"
    if ack.unverified and recovery.checkpoint:
        skipped = {**recovery.skipped, str(recovery.checkpoint): reason}
        action = _rewrite(
            view, recovery, "skip", (), clear, phase="select", skipped=skipped, attempts=0, observed_s=0.0
        )
        log = (
            "skipped",
            f"checkpoint {recovery.checkpoint} skipped: {reason}",
            {"checkpoint": recovery.checkpoint},
        )
        return Action(action.name, action.compares, action.ops, log)
    attempts = recovery.attempts + 1
    if attempts >= MAX_ATTEMPTS:
        return _needs_operator(view, recovery, reason)
    return _rewrite(
        view, recovery, "retry", (), clear, phase="select", attempts=attempts, note=reason, observed_s=0.0
    )


def _resync(view: View, recovery: Recovery, elapsed: float, config: JobConfig) -> Action | None:
    """The trainer publishes a full version; every rollout that is there proves it, or is left behind."""
    head = view.head
    if head is None or head.timeline != recovery.recovery:
        return None
    routes = view.routes()
    expected = [
        name
        for name, registered in view.participants().items()
        if registered.role == "rollout"
        and not registered.ended
        and view.alive(name)
        and not is_failed(view, name)
    ]
    missing = [name for name in expected if name not in routes]
    enough = len(routes) >= config.weights.min_rollouts
    if not enough or (missing and elapsed < config.timers.resync_deadline_s):
        return None
    note = f"left behind: {', '.join(missing)}" if missing else ""
    extra = (view.none_newer(view.keys.routes), view.same(view.keys.weight_head))
    return _rewrite(view, recovery, "resynced", extra, phase="freshness", note=note, observed_s=0.0)


def _freshness(view: View, recovery: Recovery, elapsed: float, config: JobConfig) -> Action | None:
    if config.slots.buffer and _ack(view, recovery, BUFFER, "freshness") is None:
        return None
    trainer = view.participant(TRAINER)
    ack = _ack(view, recovery, TRAINER, "restore")
    if (
        trainer is None
        or ack is None
        or trainer.incarnation != recovery.trainer
        or view.alive(TRAINER) is None
    ):
        return None
    keys = view.keys
    go = Go(
        timeline=recovery.recovery,
        incarnation=recovery.trainer,
        buffer=recovery.buffer,
        from_step=ack.step,
    )
    compares = (
        view.same(keys.timeline),
        view.same(keys.recovery),
        view.same(keys.participant(TRAINER)),
        view.same(keys.participant(BUFFER)),
        Compare(keys.go, "create", "=", 0),
    )
    ops: list[Op] = [put(keys.go, go), delete(keys.recovery), delete(keys.all_acks, prefix=True)]
    request = view.record(keys.request(recovery.request), Request) if recovery.request else None
    if request is not None:
        answer = f"went back to checkpoint {recovery.checkpoint}, step {ack.step}"
        ops.append(
            put(keys.request(recovery.request), msgspec.structs.replace(request, state="done", answer=answer))
        )
    origin = f"checkpoint {recovery.checkpoint}" if recovery.checkpoint else "nothing"
    text = f"recovery {recovery.recovery} done: step {ack.step} from {origin}"
    fields = {
        "recovery": recovery.recovery,
        "phase": "resume",
        "checkpoint": recovery.checkpoint,
        "step": ack.step,
        "skipped": recovery.skipped,
        "cause": recovery.cause,
    }
    return Action(f"resume {recovery.recovery}", compares, tuple(ops), ("recovery", text, fields))


def _wait(view: View, recovery: Recovery, elapsed: float, config: JobConfig) -> Action | None:
    """Only an operator's `retry` or `rollback` request ends this."""
    return None


def _needs_operator(view: View, recovery: Recovery, note: str) -> Action:
    action = _rewrite(view, recovery, "needs operator", phase="needs_operator", note=note)
    log = (
        "needs_operator",
        f"recovery {recovery.recovery} needs an operator: {note}",
        {"recovery": recovery.recovery},
    )
    return Action(action.name, action.compares, action.ops, log)


# -- pieces ------------------------------------------------------------------------------------------------

_ORDER = ("fence", "restore", "freshness")


def _ack(view: View, recovery: Recovery, name: str, phase: str) -> Ack | None:
    """A participant's answer for this phase or a later one, by the incarnation that is registered now."""
    ack = view.acks(recovery.recovery).get(name)
    registered = view.participant(name)
    if ack is None or registered is None or ack.incarnation != registered.incarnation or registered.ended:
        return None
    if registered.timeline != recovery.recovery or is_failed(view, name):
        return None
    return ack if _ORDER.index(ack.phase) >= _ORDER.index(phase) else None


def _rewrite(
    view: View,
    recovery: Recovery,
    name: str,
    extra: tuple[Compare, ...] = (),
    ops: tuple[Op, ...] = (),
    **changes: object,
) -> Action:
    record = msgspec.structs.replace(recovery, **changes)
    compares = (view.same(view.keys.recovery), view.same(view.keys.timeline), *extra)
    log = None
    if record.phase != recovery.phase:
        text = f"recovery {recovery.recovery}: {record.phase}"
        if record.phase == "restore":
            text += f" checkpoint {record.checkpoint}" if record.checkpoint else " from nothing"
        log = (
            "recovery",
            text,
            {"recovery": recovery.recovery, "phase": record.phase, "checkpoint": record.checkpoint},
        )
    return Action(name, compares, (put(view.keys.recovery, record), *ops), log)
