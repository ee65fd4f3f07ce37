"""The coordinator's judgement: what etcd holds, and when it was first seen, give the transactions that are due. Pure.

No I/O, clock or thread is in here or below. The coordinator applies the actions; the simulator runs this very function.
"""

from __future__ import annotations

import msgspec

from .action import Action, delete, put
from .config import JobConfig
from .keys import TRAINER
from .liveness import decide_liveness
from .model import Checkpoint, Hold, Serving, Upload
from .recovery import decide_recovery
from .retention import decide_retention
from .rounds import decide_round
from .stepmap import decide_step_map
from .view import FirstSeen, View
from .wishes import decide_requests

__all__ = ["decide"]


def decide(view: View, seen: FirstSeen, now: float, config: JobConfig) -> list[Action]:
    """All transactions that are due at monotonic time `now`; none depends on another having been applied.

    A recovery goes before everything else: in its fence the round, the routes and the grant end.
    """
    if view.timeline == 0 or view.config is None:
        return []
    actions = decide_liveness(view, seen, now, config)
    recovery = decide_recovery(view, seen, now, config)
    actions += recovery
    if not recovery:
        actions += decide_requests(view, seen, now, config)
        actions += decide_round(view, seen, now, config)
    actions += _hold_min_rollouts(view, config)
    actions += _serving(view)
    actions += _durable(view)
    actions += decide_retention(view, config)
    actions += decide_step_map(view, config)
    return actions


def _hold_min_rollouts(view: View, config: JobConfig) -> list[Action]:
    keys = view.keys
    key = keys.hold("min_rollouts")
    routes, wanted = len(view.routes()), config.weights.min_rollouts
    held = key in view.kvs
    trainer = view.participant(TRAINER)
    over = view.go is None or trainer is None or trainer.ended == "left"
    if routes < wanted and not held and not over:
        text = f"{routes} of at least {wanted} rollouts have a route"
        guards = (view.same(key), view.none_newer(keys.routes))
        log = ("hold", f"the trainer is held: {text}", {"reason": "min_rollouts"})
        return [
            Action(
                "hold min_rollouts",
                guards,
                (put(key, Hold(reason="min_rollouts", text=text, at=view.at)),),
                log,
            )
        ]
    if held and (routes >= wanted or over):
        log2 = ("hold", f"released: {routes} rollouts have a route", {"reason": "min_rollouts"})
        return [Action("release min_rollouts", (view.same(key),), (delete(key),), log2)]
    return []


def _serving(view: View) -> list[Action]:
    """The version that the fleet serves: the oldest one that has a route."""
    routes = view.routes().values()
    if not routes:
        return []
    version = min(route.version for route in routes)
    key = view.keys.serving
    current = view.record(key, Serving)
    if current is not None and (current.version, current.timeline) == (version, view.timeline):
        return []
    record = Serving(version=version, timeline=view.timeline)
    return [Action("serving", (view.same(key), view.none_newer(view.keys.routes)), (put(key, record),))]


def _durable(view: View) -> list[Action]:
    """An upload that verified every object makes its checkpoint durable; finished uploads' keys go."""
    actions = []
    for rest, upload in view.under(view.keys.uploads, Upload).items():
        key, upload_key = view.keys.checkpoint(upload.checkpoint), view.keys.uploads + rest
        record = view.record(key, Checkpoint)
        guards = (view.same(key), view.same(upload_key))
        if record is None:
            actions.append(Action("drop upload", guards, (delete(upload_key),)))
        elif upload.state == "done" and record.state == "committed":
            durable = msgspec.structs.replace(record, state="durable", remote=upload.remote)
            text = f"checkpoint {upload.checkpoint} is durable at {upload.remote}"
            log = ("durable", text, {"checkpoint": upload.checkpoint})
            actions.append(Action("durable", guards, (put(key, durable), delete(upload_key)), log))
    return actions
