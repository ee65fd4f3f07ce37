"""`slackwater status` and `slackwater log`: what a job is doing and what it did, read only."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..engine.follow import Follower
from ..engine.keys import BUFFER, TRAINER
from ..engine.liveness import is_failed
from ..engine.model import LogEntry, Recovery, Serving, decode
from ..engine.ports import KV
from ..engine.view import View
from .cli_place import (
    ConfigOption,
    EtcdOption,
    JobOption,
    JsonOption,
    console,
    find_place,
    look,
    opened,
    print_json,
)

__all__ = ["log", "picture", "status", "summary"]

_ANSWERS: dict[str, int] = {"fence": 0, "restore": 1, "freshness": 2}


def status(
    config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None, json: JsonOption = False
) -> None:
    """Show who leads, the version vector, every participant, and what waits for what."""
    place = find_place(config, job, etcd)
    with opened(place) as store:
        found = summary(look(store, place))
    if json:
        print_json(found)
    else:
        console().print(picture(found))


def summary(view: View) -> dict[str, Any]:
    """A job's state as plain values; `None` where there is nothing."""
    trainer, buffer, head = view.alive(TRAINER), view.alive(BUFFER), view.head
    serving = view.record(view.keys.serving, Serving)
    return {
        "job": view.keys.job,
        "job_uid": view.config.job_uid if view.config is not None else "",
        "revision": view.revision,
        "leader": _leader(view),
        "timeline": view.timeline,
        "vector": {
            "training_step": trainer.training_step if trainer is not None else None,
            "weight_version": head.version if head is not None else 0,
            "buffer_version": buffer.buffer_version if buffer is not None else 0,
        },
        "serving": serving.version if serving is not None else None,
        "training": view.go is not None,
        "waits": _waits(view),
        "holds": {name: hold.text for name, hold in view.holds().items()},
        "freeze": view.freeze,
        "round": view.round,
        "recovery": view.recovery,
        "checkpoint": view.last_checkpoint,
        "participants": [_participant(view, name) for name in view.participants()],
    }


def _leader(view: View) -> dict[str, Any] | None:
    candidates = [kv for kv in view.kvs.values() if kv.key.startswith(view.keys.leaders)]
    if not candidates:
        return None
    oldest = min(candidates, key=lambda kv: kv.create_revision)
    who: dict[str, Any] = msgspec.json.decode(oldest.value)
    return {**who, "epoch": oldest.create_revision, "candidates": len(candidates)}


def _participant(view: View, name: str) -> dict[str, Any]:
    registered, alive, health = view.participant(name), view.alive(name), view.health(name)
    route = view.routes().get(name)
    verdict = "failed" if is_failed(view, name) else "unknown"
    if health is not None and registered is not None and health.incarnation == registered.incarnation:
        verdict = health.state
    return {
        "name": name,
        "role": registered.role if registered is not None else "",
        "incarnation": registered.incarnation if registered is not None else "",
        "host": registered.host if registered is not None else "",
        "health": (registered.ended if registered is not None else "") or verdict,
        "evidence": health.evidence if health is not None else "",
        "state": alive.state if alive is not None else None,
        "step": alive.training_step if alive is not None else None,
        "weight_version": alive.weight_version if alive is not None else None,
        "buffer_version": alive.buffer_version if alive is not None else None,
        "waits_for": alive.waits_for if alive is not None else "",
        "route": route.url if route is not None else None,
        "routed_version": route.version if route is not None else None,
    }


def _waits(view: View) -> list[str]:
    """Who holds whom, in sentences; empty when nothing stands."""
    reasons = [_held(name, hold.text) for name, hold in view.holds().items()]
    recovery = view.recovery
    if recovery is not None:
        note = f" ({recovery.note})" if recovery.note else ""
        reasons.append(f"recovery {recovery.recovery} is in phase {recovery.phase}{note}: {recovery.cause}")
        reasons += _recovery_waits(view, recovery)
    elif view.go is None:
        reasons.append("the trainer waits for the leader's grant")
    reasons += _round_waits(view)
    for name in view.participants():
        alive = view.alive(name)
        if alive is not None and alive.waits_for:
            reasons.append(f"{name} stands: {alive.waits_for}")
    return reasons


def _held(name: str, text: str) -> str:
    who = "an operator holds the trainer" if name == "operator" else f"the trainer is held by {name}"
    return f"{who}: {text}" if text else who


def _recovery_waits(view: View, recovery: Recovery) -> list[str]:
    slots = (TRAINER, *([BUFFER] if BUFFER in view.participants() else []))
    wanted = _ANSWERS.get(recovery.phase)
    if wanted is not None:
        names = [n for n in slots if _answered(view, recovery, n) < wanted and (wanted < 2 or n == BUFFER)]
        return [f"recovery {recovery.recovery} waits for {', '.join(names)} to answer"] if names else []
    if recovery.phase == "resync":
        head, routes = view.head, view.routes()
        if head is None or head.timeline != recovery.recovery:
            return [f"recovery {recovery.recovery} waits for {TRAINER} to publish its weights"]
        names = [n for n, found in view.participants().items() if found.role == "rollout" and n not in routes]
        what = f"{', '.join(names) or 'rollouts'} to prove version {head.version}"
        return [f"recovery {recovery.recovery} waits for {what}"]
    return []


def _answered(view: View, recovery: Recovery, name: str) -> int:
    """The last phase that the registered incarnation has answered, -1 for none."""
    ack, registered = view.acks(recovery.recovery).get(name), view.participant(name)
    if ack is None or registered is None or ack.incarnation != registered.incarnation:
        return -1
    return _ANSWERS[ack.phase]


def _round_waits(view: View) -> list[str]:
    round_ = view.round
    if round_ is None or round_.phase == "prepare":
        return []
    enough = {"ready": ("ready", "saved", "sealed"), "save": ("saved", "sealed")}.get(
        round_.phase, ("sealed",)
    )
    votes = view.votes(round_.round)
    voters = (TRAINER,) if round_.phase == "seal" else round_.voters
    names = [n for n in voters if n not in votes or votes[n].state not in enough]
    return [f"round {round_.round} ({round_.phase}) waits for {', '.join(names)}"] if names else []


def picture(found: dict[str, Any]) -> Group:
    """A summary as Rich shows it: who leads, the vector, what waits, and a table of participants."""
    leader, vector = found["leader"], found["vector"]
    who = (
        f"{leader['id']} (epoch {leader['epoch']}, {leader['candidates']} candidates)" if leader else "nobody"
    )
    lines = [
        Text(f"job {found['job']}  timeline {found['timeline']}  leader {who}"),
        Text(
            f"step {vector['training_step']}  version {vector['weight_version']}  buffer {vector['buffer_version']}"
            f"  serving {found['serving']}  checkpoint {found['checkpoint'] or 'none'}"
        ),
        *(Text(f"waits: {reason}", style="yellow") for reason in found["waits"]),
    ]
    table = Table("participant", "health", "state", "step", "version", "route", "waits for")
    for one in found["participants"]:
        values = (
            one[key] for key in ("name", "health", "state", "step", "weight_version", "route", "waits_for")
        )
        table.add_row(*(Text("" if value is None else str(value)) for value in values))
    return Group(*lines, table)


# -- history -----------------------------------------------------------------------------------------------


def log(
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    json: JsonOption = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as new entries come.")] = False,
) -> None:
    """Show rounds, verdicts, recoveries and requests, oldest first; with --json one document a line."""
    place = find_place(config, job, etcd)
    with opened(place) as store:
        look(store, place)
        follower = Follower(store, place.keys.logs)
        try:
            follower.poll(0.0)
            _print_entries(follower, json)
            while follow:
                if follower.poll(1.0):
                    _print_entries(follower, json)
        except KeyboardInterrupt:
            return
        finally:
            follower.close()


def _print_entries(follower: Follower, json: bool) -> None:
    for key in sorted(follower.changed_keys):
        kv = follower.kvs.get(key)
        if kv is not None:
            typer.echo(_line(kv, json))


def _line(kv: KV, json: bool) -> str:
    entry = decode(LogEntry, kv.value, kv.key)
    number = int(kv.key.rsplit("/", 1)[1])
    if json:
        return msgspec.json.encode({"number": number, **msgspec.to_builtins(entry)}).decode()
    return f"{entry.at}  {entry.kind:<14} {entry.text}"
