"""Commands that ask the leader for something: one request key each, and its fate read back."""

from __future__ import annotations

import datetime
import getpass
import socket
import time
import uuid
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer

from ..engine.action import put
from ..engine.errors import DeadlineExceeded, Refused, SlackwaterError, Unavailable
from ..engine.follow import Follower
from ..engine.model import LogEntry, Request, decode
from ..engine.ports import Compare, StateStore, Txn
from .cli_place import ConfigOption, EtcdOption, JobOption, Place, find_place, look, opened

__all__ = ["ask", "checkpoint", "hold", "pin", "release", "remove", "retry", "rollback", "unpin"]

_TRIES = 5
_ANSWER_SECONDS = 30.0

WaitOption = Annotated[bool, typer.Option("--wait", help="Return when it is done, and fail when it was not.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Longest wait in seconds.")]


def checkpoint(
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    wait: WaitOption = False,
    timeout: TimeoutOption = 900.0,
) -> None:
    """Take a checkpoint at the end of the current training step."""
    _run(find_place(config, job, etcd), Request(kind="checkpoint"), timeout if wait else 0.0)


def rollback(
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    to: Annotated[int, typer.Option("--to", min=0, help="Checkpoint id; 0 is the newest.")] = 0,
    wait: WaitOption = False,
    timeout: TimeoutOption = 900.0,
) -> None:
    """Bring trainer, rollouts and buffer back to a checkpoint, as a recovery on a new timeline."""
    _run(find_place(config, job, etcd), Request(kind="rollback", checkpoint=to), timeout if wait else 0.0)


def hold(
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
    reason: Annotated[str, typer.Option("--reason", help="Shown to whoever asks why it waits.")] = "",
) -> None:
    """Let the trainer stand at the end of its step until `release`."""
    _run(find_place(config, job, etcd), Request(kind="hold", name=reason), _ANSWER_SECONDS)


def release(config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None) -> None:
    """End an operator's hold."""
    _run(find_place(config, job, etcd), Request(kind="release"), _ANSWER_SECONDS)


def retry(config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None) -> None:
    """Let a recovery that needs an operator try again, from the newest checkpoint on."""
    _run(find_place(config, job, etcd), Request(kind="retry"), _ANSWER_SECONDS)


def remove(
    name: Annotated[str, typer.Argument(help="The rollout's name.")],
    config: ConfigOption = None,
    job: JobOption = None,
    etcd: EtcdOption = None,
) -> None:
    """Forget a rollout that will not come back."""
    _run(find_place(config, job, etcd), Request(kind="remove", name=name), _ANSWER_SECONDS)


NumberArgument = Annotated[int, typer.Argument(min=1, help="The checkpoint's id.")]


def pin(
    number: NumberArgument, config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None
) -> None:
    """Keep a checkpoint whatever retention says, until `unpin`."""
    _run(find_place(config, job, etcd), Request(kind="pin", checkpoint=number), _ANSWER_SECONDS)


def unpin(
    number: NumberArgument, config: ConfigOption = None, job: JobOption = None, etcd: EtcdOption = None
) -> None:
    """Leave a pinned checkpoint to retention again."""
    _run(find_place(config, job, etcd), Request(kind="unpin", checkpoint=number), _ANSWER_SECONDS)


# -- inside ------------------------------------------------------------------------------------------------


def _run(place: Place, request: Request, timeout_seconds: float) -> None:
    with opened(place) as store:
        look(store, place)
        identity = ask(store, place, request)
        if timeout_seconds <= 0:
            typer.echo(f"asked: request {identity}")
            return
        answered = wait_for(store, place, identity, timeout_seconds)
    typer.echo(answered.answer or answered.state)


def ask(store: StateStore, place: Place, request: Request) -> str:
    """Write a request and return its id. Safe to send again: the id is new and the put needs its absence."""
    identity = uuid.uuid4().hex
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    request = msgspec.structs.replace(request, by=f"{_user()}@{socket.gethostname()}", at=now)
    key = place.keys.request(identity)
    txn = Txn(
        (Compare(key, "create", "=", 0), Compare(place.keys.config, "create", ">", 0)), (put(key, request),)
    )
    for _ in range(_TRIES):
        try:
            if store.txn(txn).succeeded or store.get(key) is not None:
                return identity
        except Unavailable:
            continue
        raise Refused(f"job {place.job!r} is gone")
    raise Unavailable(f"etcd does not answer reliably; look for {key}")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return "unknown"


def wait_for(
    store: StateStore,
    place: Place,
    identity: str,
    timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Request:
    """Wait until the leader has answered. `Refused` with its reason, `DeadlineExceeded` when nobody did in time."""
    key = place.keys.request(identity)
    follower = Follower(store, key, clock=clock)
    end = clock() + timeout_seconds
    state = "new"
    try:
        while clock() < end:
            follower.poll(min(1.0, max(0.0, end - clock())))
            kv = follower.kvs.get(key)
            if kv is None:
                raise SlackwaterError(f"request {identity} is gone; `slackwater log` says what happened")
            request = decode(Request, kv.value, key)
            state = request.state
            if state == "done":
                return request
            if state == "refused":
                raise Refused(f"{request.kind} refused: {_reason(store, place, identity) or request.answer}")
    finally:
        follower.close()
    why = "no coordinator took it up" if state == "new" else f"it is {state}, not done"
    raise DeadlineExceeded(f"request {identity}: {why} within {timeout_seconds:g} s")


def _reason(store: StateStore, place: Place, identity: str) -> str:
    """Why the round of an accepted request was given up, as the history tells it; "" when it does not."""
    entries = [decode(LogEntry, kv.value, kv.key) for kv in store.range(place.keys.logs).kvs]
    told = [e.text for e in entries if e.kind == "abort" and e.fields.get("request") == identity]
    return told[-1] if told else ""
