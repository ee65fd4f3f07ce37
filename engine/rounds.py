"""A checkpoint round from prepare to commit or abort, as decisions of the leader. Pure.

prepare -> (the trainer's boundary transaction sets the freeze) -> ready -> save -> seal -> commit; at any point abort.
"""

from __future__ import annotations

import msgspec

from .action import Action, delete, put
from .config import JobConfig
from .keys import BUFFER, TRAINER
from .liveness import is_failed
from .model import Checkpoint, CheckpointHead, Freeze, Record, Request, Round, RoundHead, Vote
from .ports import Compare, Op
from .view import FirstSeen, View

__all__ = ["abort", "decide_round", "next_round"]


def decide_round(view: View, seen: FirstSeen, now: float, config: JobConfig) -> list[Action]:
    """What the open round needs now, or the next round when one is due."""
    round_ = view.round
    freeze = view.freeze
    if round_ is None:
        if freeze is not None:
            # Nobody owns it: its round is gone. The flag of a dead round must not outlive it.
            keys = view.keys
            compares = (view.same(keys.freeze), Compare(keys.round, "create", "=", 0))
            return [Action("clear orphan freeze", compares, (delete(keys.freeze),))]
        return _open(view, seen, now, config)
    if round_.timeline != view.timeline:
        return [abort(view, round_, "its timeline is over")]
    elapsed = round_.observed_s + seen.elapsed(view.keys.round, view.mod(view.keys.round), now)
    step = {"prepare": _prepare, "ready": _ready, "save": _save, "seal": _seal}[round_.phase]
    action = step(view, round_, elapsed, config)
    if action is None and elapsed - round_.observed_s >= config.timers.persist_s and _is_timed(view, round_):
        action = _rewrite(view, round_, "observe round", observed_s=round(elapsed, 3))
    return [] if action is None else [action]


def _is_timed(view: View, round_: Round) -> bool:
    return round_.phase != "prepare" or _is_overdue(view, round_)


def _is_overdue(view: View, round_: Round) -> bool:
    alive = view.alive(TRAINER)
    return alive is not None and alive.training_step >= round_.not_before_step


# -- opening -----------------------------------------------------------------------------------------------


def _open(view: View, seen: FirstSeen, now: float, config: JobConfig) -> list[Action]:
    go, trainer = view.go, view.alive(TRAINER)
    if go is None or trainer is None or view.recovery is not None or is_failed(view, TRAINER):
        return []
    settings = config.checkpoint
    last = view.record(view.keys.round_head, RoundHead) or RoundHead(round=0)
    if settings.every_seconds > 0:
        head = view.keys.checkpoint_head if view.last_checkpoint else view.keys.go
        if seen.elapsed(head, view.mod(head), now) >= settings.every_seconds:
            return [next_round(view, config, last, 0, "time")]
    if settings.every_steps > 0:
        every = settings.every_steps
        # The report may be a few beats old: what was announced and cut on this timeline is newer.
        announced = last.not_before_step if last.timeline == view.timeline else 0
        cuts = (r.training_step for r in view.checkpoints().values() if r.timeline == view.timeline)
        done = max(trainer.training_step, go.from_step, announced, *cuts)
        return [next_round(view, config, last, done // every * every + every, "steps")]
    return []


def next_round(
    view: View, config: JobConfig, last: RoundHead, not_before_step: int, trigger: str, request: str = ""
) -> Action:
    """The prepare transaction: announces the cut ahead of time and freezes nothing. It takes no checkpoint id."""
    number = last.round + 1
    record = Round(
        round=number,
        timeline=view.timeline,
        mode=config.checkpoint.mode,
        trigger=trigger,
        request=request,
        at=view.at,
        not_before_step=not_before_step,
    )
    keys = view.keys
    compares = (
        Compare(keys.round, "create", "=", 0),
        view.same(keys.round_head),
        view.same(keys.timeline),
        Compare(keys.recovery, "create", "=", 0),
    )
    head = RoundHead(round=number, not_before_step=not_before_step, timeline=view.timeline)
    return Action(f"prepare round {number}", compares, (put(keys.round, record), put(keys.round_head, head)))


# -- the phases --------------------------------------------------------------------------------------------


def _prepare(view: View, round_: Round, elapsed: float, config: JobConfig) -> Action | None:
    freeze = view.freeze
    if freeze is not None and freeze.token == view.create(view.keys.round):
        return _fix_voters(view, round_, freeze, config)
    if is_failed(view, TRAINER):
        return abort(view, round_, "the trainer failed before the cut")
    if _is_overdue(view, round_) and elapsed >= config.timers.prepare_deadline_s:
        return abort(view, round_, f"the trainer took no cut within {config.timers.prepare_deadline_s:g} s")
    return None


def _fix_voters(view: View, round_: Round, freeze: Freeze, config: JobConfig) -> Action:
    names = [TRAINER, *([BUFFER] if config.slots.buffer else []), *view.routes()]
    registered = view.participants()
    voters = {name: registered[name].incarnation for name in names if name in registered}
    keys = view.keys
    extra = (view.same(keys.freeze), view.none_newer(keys.participants), view.none_newer(keys.routes))
    return _rewrite(
        view,
        round_,
        f"freeze seen in round {round_.round}",
        extra,
        phase="ready",
        step=freeze.step,
        version=freeze.version,
        path=freeze.path,
        voters=voters,
        observed_s=0.0,
    )


def _ready(view: View, round_: Round, elapsed: float, config: JobConfig) -> Action | None:
    problem = _broken_slot(view, round_) or _failed_vote(view, round_)
    if problem:
        return abort(view, round_, problem)
    ready = _voted(view, round_, ("ready", "saved", "sealed"))
    routes = view.routes()
    on_cut = {name for name in routes if routes[name].version == round_.version}
    gone = [n for n in round_.voters if n not in (TRAINER, BUFFER) and n not in ready and n not in routes]
    waiting = [name for name in round_.voters if name not in ready and name not in gone]
    extra = (view.none_newer(view.keys.participants), view.none_newer(view.keys.routes))
    if not waiting:
        return _open_save(view, round_, gone, extra)
    half = elapsed >= config.timers.ready_deadline_s / 2
    late = [name for name in waiting if name not in (TRAINER, BUFFER)]
    stays = len(on_cut & ready)
    if half and late and stays >= config.weights.min_rollouts:
        return _drop(view, round_, [*late, *gone], extra)
    if elapsed >= config.timers.ready_deadline_s:
        names = ", ".join(waiting)
        return abort(view, round_, f"not ready within {config.timers.ready_deadline_s:g} s: {names}")
    return None


def _open_save(view: View, round_: Round, gone: list[str], extra: tuple[Compare, ...]) -> Action:
    voters = {name: inc for name, inc in round_.voters.items() if name not in gone}
    # All is proven and cut: in `overlap` publication may go on while files are written.
    ops = () if round_.mode == "strict" else (delete(view.keys.freeze),)
    votes = (view.none_newer(view.keys.votes(round_.round)), view.same(view.keys.freeze))
    return _rewrite(
        view,
        round_,
        f"save round {round_.round}",
        (*extra, *votes),
        ops,
        phase="save",
        voters=voters,
        dropped=(*round_.dropped, *gone),
        observed_s=0.0,
    )


def _drop(view: View, round_: Round, late: list[str], extra: tuple[Compare, ...]) -> Action:
    """One slow rollout does not veto a checkpoint: it loses its route and its vote."""
    voters = {name: inc for name, inc in round_.voters.items() if name not in late}
    ops = tuple(delete(view.keys.route(name)) for name in late)
    action = _rewrite(view, round_, "drop late", extra, ops, voters=voters, dropped=(*round_.dropped, *late))
    text = f"round {round_.round}: {', '.join(late)} not on version {round_.version} in time; routes taken"
    return _with_log(action, ("round", text, {"round": round_.round, "dropped": late}))


def _save(view: View, round_: Round, elapsed: float, config: JobConfig) -> Action | None:
    problem = _broken_slot(view, round_) or _failed_vote(view, round_)
    if problem:
        return abort(view, round_, problem)
    saved = _voted(view, round_, ("saved", "sealed"))
    if all(name in saved for name in round_.voters):
        return _rewrite(
            view,
            round_,
            f"seal round {round_.round}",
            (view.none_newer(view.keys.votes(round_.round)),),
            phase="seal",
        )
    if elapsed >= config.timers.save_deadline_s:
        missing = ", ".join(name for name in round_.voters if name not in saved)
        return abort(view, round_, f"not saved within {config.timers.save_deadline_s:g} s: {missing}")
    return None


def _seal(view: View, round_: Round, elapsed: float, config: JobConfig) -> Action | None:
    problem = _failed_vote(view, round_)
    if problem:
        return abort(view, round_, problem)
    votes = view.votes(round_.round)
    seal = votes.get(TRAINER)
    if seal is None or not _counts(round_, TRAINER, seal) or seal.state != "sealed":
        registered = view.participant(TRAINER)
        if registered is None or registered.incarnation != round_.voters.get(TRAINER):
            return abort(view, round_, "the trainer was replaced before it sealed the manifest")
        if elapsed >= config.timers.save_deadline_s:
            return abort(view, round_, f"not sealed within {config.timers.save_deadline_s:g} s")
        return None
    if not all(name in _voted(view, round_, ("saved", "sealed")) for name in round_.voters):
        return abort(view, round_, "a vote was withdrawn")
    return commit(view, round_, seal)


def commit(view: View, round_: Round, seal: Vote) -> Action:
    """The one commit point. Before this transaction nothing exists, after it the checkpoint does."""
    number = view.last_checkpoint + 1
    buffer_vote = view.votes(round_.round).get(BUFFER)
    record = Checkpoint(
        checkpoint=number,
        timeline=round_.timeline,
        round=round_.round,
        training_step=round_.step,
        weight_version=round_.version,
        buffer_version=buffer_vote.buffer_version if buffer_vote is not None else 0,
        path=seal.path,
        manifest_digest=seal.digest,
        host=seal.host,
        size_bytes=seal.size_bytes,
        files=seal.files,
        sampling_revision=view.sampling.revision,
        at=view.at,
    )
    keys = view.keys
    compares = (
        view.same(keys.timeline),
        view.same(keys.round),
        view.none_newer(keys.participants),
        view.none_newer(keys.votes(round_.round)),
        view.same(keys.checkpoint_head),
        Compare(keys.checkpoint(number), "create", "=", 0),
    )
    ops: list[Op] = [
        put(keys.checkpoint(number), record),
        put(keys.checkpoint_head, CheckpointHead(checkpoint=number)),
        *_close(view, round_),
    ]
    ops += _answer(view, round_, "done", f"checkpoint {number}")
    text = (
        f"checkpoint {number} committed: step {round_.step}, version {round_.version}, round {round_.round}"
    )
    fields: dict[str, object] = {
        "checkpoint": number,
        "round": round_.round,
        "step": round_.step,
        "version": round_.version,
        "size_bytes": seal.size_bytes,
        "blocked_s": seal.statistics.get("blocked_s"),
    }
    return Action(f"commit {number}", compares, tuple(ops), ("commit", text, fields))


def abort(view: View, round_: Round, reason: str) -> Action:
    """Close a round without a checkpoint: deletes only, so that even a full store accepts it."""
    text = f"round {round_.round} aborted in {round_.phase}: {reason}"
    fields = {"round": round_.round, "phase": round_.phase, "reason": reason, "request": round_.request}
    token = Compare(view.keys.round, "create", "=", view.create(view.keys.round))
    return Action(f"abort {round_.round}", (token,), tuple(_close(view, round_)), ("abort", text, fields))


def _close(view: View, round_: Round) -> list[Op]:
    return [
        delete(view.keys.freeze),
        delete(view.keys.round),
        delete(view.keys.votes(round_.round), prefix=True),
    ]


def _answer(view: View, round_: Round, state: str, answer: str) -> list[Op]:
    key = view.keys.request(round_.request)
    request = view.record(key, Request) if round_.request else None
    if request is None:
        return []
    return [put(key, msgspec.structs.replace(request, state=state, answer=answer))]


# -- votes -------------------------------------------------------------------------------------------------


def _counts(round_: Round, name: str, vote: Vote) -> bool:
    """Whether a vote is for this round's cut, by the very incarnation that was made a voter."""
    return (
        vote.incarnation == round_.voters.get(name)
        and vote.timeline == round_.timeline
        and vote.step == round_.step
        and vote.version == round_.version
    )


def _voted(view: View, round_: Round, states: tuple[str, ...]) -> set[str]:
    votes = view.votes(round_.round)
    return {name for name, vote in votes.items() if vote.state in states and _counts(round_, name, vote)}


def _failed_vote(view: View, round_: Round) -> str:
    for name, vote in view.votes(round_.round).items():
        if vote.state == "failed" and vote.incarnation == round_.voters.get(name):
            return f"{name} could not save: {vote.error}"
    return ""


def _broken_slot(view: View, round_: Round) -> str:
    """Why the trainer or the buffer cannot finish this round, if so."""
    for name in (TRAINER, BUFFER):
        if name not in round_.voters:
            if name == TRAINER:
                return "the trainer's registration is gone"
            continue
        registered = view.participant(name)
        if registered is None or registered.incarnation != round_.voters[name]:
            return f"{name} was replaced"
        if registered.ended or is_failed(view, name):
            return f"{name} is gone"
    return ""


def _rewrite(
    view: View,
    round_: Round,
    name: str,
    extra: tuple[Compare, ...] = (),
    ops: tuple[Op, ...] = (),
    **changes: object,
) -> Action:
    record: Record = msgspec.structs.replace(round_, **changes)
    compares = (view.same(view.keys.round), view.same(view.keys.timeline), *extra)
    return Action(name, compares, (put(view.keys.round, record), *ops))


def _with_log(action: Action, log: tuple[str, str, dict[str, object]]) -> Action:
    """The same action with an entry for the history."""
    return Action(action.name, action.compares, action.ops, log)
