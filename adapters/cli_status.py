"""`slackwater status` and `slackwater log`: what a job is doing and what it did, read only."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ..engine.follow import Follower
from ..engine.keys import BUFFER, TRAINER
from ..engine.liveness import is_failed
from ..engine.model import LogEntry, Serving, decode
from ..engine.ports import KV
from ..engine.view import View
from .cli_place import (
    ConfigOption,
    EtcdOption,
    JobOption,
    JsonOption,
    find_place,
    look,
    opened,
    print_json,
)

__all__ = ["log", "status", "summary"]


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
        _show(found)


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
    """Why the trainer does not train, in sentences; empty when nothing holds it."""
    reasons = [hold.text or f"hold: {name}" for name, hold in view.holds().items()]
    recovery, round_ = view.recovery, view.round
    if recovery is not None:
        note = f" ({recovery.note})" if recovery.note else ""
        reasons.append(f"recovery {recovery.recovery} is in phase {recovery.phase}{note}: {recovery.cause}")
        missing = [
            name
            for name in (TRAINER, *([BUFFER] if BUFFER in view.participants() else []))
            if name not in view.acks(recovery.recovery)
        ]
        if recovery.phase == "fence" and missing:
            reasons.append(f"waiting for {', '.join(missing)} to answer")
    elif view.go is None:
        reasons.append("the trainer has no grant")
    if round_ is not None and round_.phase != "prepare":
        votes = view.votes(round_.round)
        waiting = [name for name in round_.voters if name not in votes]
        if waiting:
            reasons.append(f"round {round_.round} ({round_.phase}) waits for {', '.join(waiting)}")
    return reasons


def _show(found: dict[str, Any]) -> None:
    console = Console()
    leader, vector = found["leader"], found["vector"]
    who = (
        f"{leader['id']} (epoch {leader['epoch']}, {leader['candidates']} candidates)" if leader else "nobody"
    )
    console.print(f"job {found['job']}  timeline {found['timeline']}  leader {who}", highlight=False)
    console.print(
        f"step {vector['training_step']}  version {vector['weight_version']}  buffer {vector['buffer_version']}"
        f"  serving {found['serving']}  checkpoint {found['checkpoint'] or 'none'}",
        highlight=False,
    )
    for reason in found["waits"]:
        console.print(f"waits: {reason}", style="yellow", highlight=False, markup=False)
    table = Table("participant", "health", "state", "step", "version", "route", "waits for")
    for one in found["participants"]:
        values = (
            one[key] for key in ("name", "health", "state", "step", "weight_version", "route", "waits_for")
        )
        table.add_row(*("" if value is None else str(value) for value in values))
    console.print(table)


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
