"""Verdicts on participants: alive, suspected, failed. Pure; slow is not dead, and silence takes its time.

A missing liveness key makes a participant `suspected`; a whole window more makes it `failed`. Hard evidence (its beat
said that the process is gone, or it made no progress for longer than its state allows) does not wait for the window.
"""

from __future__ import annotations

import msgspec

from .action import Action, delete, put
from .config import JobConfig
from .keys import TRAINER
from .model import Alive, Health, Participant
from .ports import Compare, Op
from .view import FirstSeen, View

__all__ = ["decide_liveness", "is_failed", "mass_silence"]

_MASS_HOSTS = 4
_MASS_FACTOR = 4.0


def is_failed(view: View, name: str) -> bool:
    """Whether the leader has declared this registration failed."""
    registered, health = view.participant(name), view.health(name)
    return (
        registered is not None
        and health is not None
        and health.incarnation == registered.incarnation
        and health.state == "failed"
    )


def mass_silence(view: View) -> bool:
    """More than half of four or more hosts are silent at once: more likely the network than a massacre."""
    hosts: dict[str, bool] = {}
    for name, registered in view.participants().items():
        if not registered.ended and registered.host:
            alive = view.alive(name) is not None
            hosts[registered.host] = hosts.get(registered.host, False) or alive
    silent = sum(not alive for alive in hosts.values())
    return len(hosts) >= _MASS_HOSTS and 2 * silent > len(hosts)


def decide_liveness(view: View, seen: FirstSeen, now: float, config: JobConfig) -> list[Action]:
    """Every verdict that is due now."""
    actions = []
    window = config.timers.window_s * (_MASS_FACTOR if mass_silence(view) else 1.0)
    for name, registered in view.participants().items():
        action = _judge(view, seen, now, config, window, name, registered)
        if action is not None:
            actions.append(action)
    return actions


def _judge(
    view: View,
    seen: FirstSeen,
    now: float,
    config: JobConfig,
    window: float,
    name: str,
    registered: Participant,
) -> Action | None:
    health = view.health(name)
    if health is not None and health.incarnation != registered.incarnation:
        health = None
    if registered.ended == "left":
        return _forget(view, name, registered)
    if health is not None and health.state == "failed":
        return None
    alive = view.alive(name)
    if alive is not None and alive.incarnation != registered.incarnation:
        alive = None
    if registered.ended == "exited":
        return _verdict(
            view, name, registered, health, "failed", f"exited: {registered.reason or 'no reason given'}"
        )
    if alive is None:
        return _judge_silent(view, seen, now, config, window, name, registered, health)
    if health is None or health.state == "suspected":
        return _verdict(view, name, registered, health, "alive", "")
    return _judge_progress(view, seen, now, config, name, registered, health, alive)


def _judge_silent(
    view: View,
    seen: FirstSeen,
    now: float,
    config: JobConfig,
    window: float,
    name: str,
    registered: Participant,
    health: Health | None,
) -> Action | None:
    if health is None or health.state == "alive":
        return _verdict(view, name, registered, health, "suspected", "its lease expired")
    key = view.keys.health(name)
    since = seen.elapsed(key, view.mod(key), now)
    silent = health.observed_s + since
    if silent >= window:
        return _verdict(view, name, registered, health, "failed", f"silent for the lease and {silent:.1f} s")
    if since >= config.timers.persist_s:
        return _observe(view, name, health, silent)
    return None


def _judge_progress(
    view: View,
    seen: FirstSeen,
    now: float,
    config: JobConfig,
    name: str,
    registered: Participant,
    health: Health,
    alive: Alive,
) -> Action | None:
    limit: float = getattr(config.timers.stall_s, alive.state)
    if limit <= 0:
        return None
    key, health_key = view.keys.alive(name), view.keys.health(name)
    same_life = health.evidence == f"no progress since revision {view.mod(key)}"
    since = seen.elapsed(key, view.mod(key), now)
    if same_life:
        since = max(since, health.observed_s + seen.elapsed(health_key, view.mod(health_key), now))
    if since >= limit:
        text = f"stalled: no progress in state {alive.state} for {since:.0f} s"
        return _verdict(view, name, registered, health, "failed", text)
    if since >= limit / 4 and seen.elapsed(health_key, view.mod(health_key), now) >= config.timers.persist_s:
        note = msgspec.structs.replace(health, evidence=f"no progress since revision {view.mod(key)}")
        return _observe(view, name, note, since)
    return None


def _observe(view: View, name: str, health: Health, observed_s: float) -> Action:
    key = view.keys.health(name)
    record = msgspec.structs.replace(health, observed_s=round(observed_s, 3))
    return Action(f"observe {name}", (view.same(key), view.same(view.keys.alive(name))), (put(key, record),))


def _verdict(
    view: View, name: str, registered: Participant, health: Health | None, state: str, evidence: str
) -> Action:
    key, alive_key = view.keys.health(name), view.keys.alive(name)
    # `failed` must not overtake a participant that came back: its liveness key is as we saw it, absent or unchanged.
    compares = (
        view.same(key),
        Compare(alive_key, "mod", "=", view.mod(alive_key)),
        view.same(view.keys.participant(name)),
    )
    record = Health(incarnation=registered.incarnation, state=state, evidence=evidence, at=view.at)  # type: ignore[arg-type]
    ops: list[Op] = [put(key, record)]
    if state == "failed" and registered.role == "rollout":
        ops.append(delete(view.keys.route(name)))
    if state == "failed" and name == TRAINER:
        ops.append(delete(view.keys.go))
    text = f"{name} is {state}" + (f": {evidence}" if evidence else "")
    log = (
        None
        if state == "alive" and health is None
        else ("verdict", text, {"participant": name, "state": state})
    )
    return Action(f"{state} {name}", compares, tuple(ops), log)


def _forget(view: View, name: str, registered: Participant) -> Action | None:
    """A rollout that said goodbye is removed, but never in a round: a range compare does not see deletions."""
    if registered.role != "rollout" or (view.round is not None and view.freeze is not None):
        return None
    keys = view.keys
    compares = (view.same(keys.participant(name)), view.same(keys.freeze), view.same(keys.round))
    ops = (
        delete(keys.participant(name)),
        delete(keys.health(name)),
        delete(keys.alive(name)),
        delete(keys.route(name)),
    )
    return Action(f"forget {name}", compares, ops, ("left", f"{name} left", {"participant": name}))
