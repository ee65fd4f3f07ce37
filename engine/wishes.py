"""Operators' requests: each becomes one transaction that takes effect and marks the request, or refuses it. Pure."""

from __future__ import annotations

import msgspec

from .action import Action, delete, put
from .config import JobConfig
from .model import Checkpoint, Hold, Request, RoundHead, Sampling
from .ports import Compare, Op
from .recovery import fence
from .rounds import next_round
from .view import FirstSeen, View

__all__ = ["decide_requests"]


_TRIM_SECONDS = 24 * 3600.0


def decide_requests(view: View, seen: FirstSeen, now: float, config: JobConfig) -> list[Action]:
    """At most one new request, the oldest first, so that each sees the effect of the one before.

    Also closes what lost its round, and trims what was answered a day ago.
    """
    requests = view.under(view.keys.requests, Request)
    waiting = [
        (view.create(view.keys.requests + uuid), uuid, request)
        for uuid, request in requests.items()
        if request.state == "new"
    ]
    if not waiting:
        return _tidy(view, seen, now, requests)
    _, uuid, request = min(waiting)
    action = _grant(view, uuid, request, config)
    return [] if action is None else [action]


def _tidy(view: View, seen: FirstSeen, now: float, requests: dict[str, Request]) -> list[Action]:
    round_, recovery = view.round, view.recovery
    open_ones = {
        round_.request if round_ is not None else "",
        recovery.request if recovery is not None else "",
    }
    for uuid, request in requests.items():
        key = view.keys.requests + uuid
        if request.state == "accepted" and uuid not in open_ones:
            text = "its round was aborted or its recovery was replaced; `slackwater log` says why"
            return [_close(view, uuid, request, "refused", text, (), (view.keys.round, view.keys.recovery))]
        if request.state in ("done", "refused") and seen.elapsed(key, view.mod(key), now) >= _TRIM_SECONDS:
            return [Action("trim request", (view.same(key),), (delete(key),))]
    return []


def _grant(view: View, uuid: str, request: Request, config: JobConfig) -> Action | None:
    kind = request.kind
    if kind == "checkpoint":
        return _checkpoint(view, uuid, request, config)
    if kind == "rollback":
        return _rollback(view, uuid, request)
    if kind == "retry":
        recovery = view.recovery
        if recovery is None or recovery.phase != "needs_operator":
            return _close(view, uuid, request, "refused", "no recovery waits for an operator")
        record = msgspec.structs.replace(
            recovery, phase="select", attempts=0, skipped={}, note="", observed_s=0.0
        )
        return _close(
            view,
            uuid,
            request,
            "done",
            "trying again",
            (put(view.keys.recovery, record),),
            (view.keys.recovery,),
        )
    if kind in ("hold", "release"):
        key = view.keys.hold("operator")
        op: Op = (
            put(key, Hold(reason="operator", text=request.name, at=view.at))
            if kind == "hold"
            else delete(key)
        )
        return _close(view, uuid, request, "done", kind, (op,))
    if kind == "sampling":
        revision = view.sampling.revision + 1
        record2 = Sampling(revision=revision, parameters=request.parameters)
        return _close(
            view,
            uuid,
            request,
            "done",
            f"revision {revision}",
            (put(view.keys.sampling, record2),),
            (view.keys.sampling,),
        )
    if kind in ("pin", "unpin"):
        key = view.keys.checkpoint(request.checkpoint)
        found = view.record(key, Checkpoint)
        if found is None or found.state == "deleting":
            return _close(view, uuid, request, "refused", f"there is no checkpoint {request.checkpoint}")
        pinned = msgspec.structs.replace(found, pinned=kind == "pin")
        return _close(view, uuid, request, "done", kind, (put(key, pinned),), (key,))
    return _remove(view, uuid, request)


def _checkpoint(view: View, uuid: str, request: Request, config: JobConfig) -> Action | None:
    if view.recovery is not None or view.go is None:
        return None  # it waits for the recovery
    round_ = view.round
    accepted = put(view.keys.request(uuid), msgspec.structs.replace(request, state="accepted"))
    guard = view.same(view.keys.request(uuid))
    if round_ is None:
        last = view.record(view.keys.round_head, RoundHead) or RoundHead(round=0)
        action = next_round(view, config, last, 0, "request", uuid)
        return Action(action.name, (*action.compares, guard), (*action.ops, accepted), action.log)
    if round_.phase != "prepare" or view.freeze is not None or round_.request:
        return None  # the next round is this one's
    # A round is announced already: pull it forward to the end of the current step.
    now = msgspec.structs.replace(round_, not_before_step=0, trigger="request", request=uuid)
    # What was announced is not taken at that step any more, so the multiple that it was meant for stays open.
    head = RoundHead(round=round_.round, timeline=view.timeline)
    compares = (view.same(view.keys.round), view.same(view.keys.freeze), guard)
    return Action(
        f"pull round {round_.round} forward",
        compares,
        (put(view.keys.round, now), put(view.keys.round_head, head), accepted),
    )


def _rollback(view: View, uuid: str, request: Request) -> Action:
    eligible = [record.checkpoint for record in view.eligible()]
    number = request.checkpoint or (eligible[0] if eligible else 0)
    if number not in eligible:
        return _close(
            view, uuid, request, "refused", f"checkpoint {number} is not on the lineage; there are {eligible}"
        )
    action = fence(view, f"an operator asked to go back to checkpoint {number}", target=number, request=uuid)
    accepted = put(view.keys.request(uuid), msgspec.structs.replace(request, state="accepted"))
    return Action(
        action.name,
        (*action.compares, view.same(view.keys.request(uuid))),
        (*action.ops, accepted),
        action.log,
    )


def _remove(view: View, uuid: str, request: Request) -> Action | None:
    found = view.participant(request.name)
    if found is None or found.role != "rollout":
        return _close(view, uuid, request, "refused", f"there is no rollout {request.name!r}")
    if view.freeze is not None:
        return None  # never in a round
    keys = view.keys
    ops = (
        delete(keys.participant(request.name)),
        delete(keys.route(request.name)),
        delete(keys.health(request.name)),
    )
    return _close(view, uuid, request, "done", "removed", ops, (keys.freeze, keys.round))


def _close(
    view: View,
    uuid: str,
    request: Request,
    state: str,
    answer: str,
    ops: tuple[Op, ...] = (),
    unchanged: tuple[str, ...] = (),
) -> Action:
    key = view.keys.request(uuid)
    record = msgspec.structs.replace(request, state=state, answer=answer)
    compares: tuple[Compare, ...] = (view.same(key), *(view.same(other) for other in unchanged))
    log = (
        "request",
        f"{request.kind} {state}: {answer}",
        {"request": uuid, "kind": request.kind, "state": state},
    )
    return Action(f"request {request.kind}", compares, (put(key, record), *ops), log)
