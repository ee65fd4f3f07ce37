"""Faults and how each strikes: at a time, or when a certain transaction is sent or was applied."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from slackwater.engine.errors import StoreError
from slackwater.engine.model import Freeze, Request, Vote, encode
from slackwater.engine.ports import Compare, Put, Txn

from .network import Dam, Trap, Weather
from .world import World

__all__ = ["Fault", "arm", "ask"]

WEATHER = ("drop", "lost", "late", "slow", "watch", "duplicate", "echo")


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fault: what happens to whom, when (seconds), for how long or how likely.

    With `on` = "who key text" it waits from `at` for the first transaction of `who` that writes below `key` with
    `text` in a value: until it was applied, or with `before` until it is about to be sent. `key` is what a dam holds.
    """

    at: float
    kind: str
    who: str = ""
    seconds: float = 0.0
    chance: float = 0.0
    on: str = ""
    before: bool = False
    key: str = ""


def arm(world: World, fault: Fault) -> None:
    """Let the fault come when its time has come."""

    def begin() -> None:
        if not fault.on:
            _strike(world, fault)
            return
        who, key, text = (*fault.on.split(" "), "", "")[:3]
        # From the queue: what a process does to itself must not happen inside its own call.
        strike = (
            (lambda: _strike(world, fault))
            if fault.kind in ("dam", *WEATHER)
            else lambda: world.kernel.after(0.0, lambda: _strike(world, fault))
        )
        world.network.traps.append(Trap(who, key, text, fault.before, strike))

    world.kernel.after(fault.at, begin)


def ask(world: World, request: Request) -> None:
    """An operator's wish."""
    key = world.keys.request(world.new_id())
    world.store.txn(Txn((Compare(key, "create", "=", 0),), (Put(key, encode(request)),)))


def _strike(world: World, fault: Fault) -> None:
    name = fault.who
    if name == "leader":
        name = world.leader().split("#")[0] or "coordinator-0"
    world.disturb(fault.kind, fault.who, fault.seconds)
    if fault.kind in WEATHER:
        until = world.kernel.now + fault.seconds
        world.network.weather.append(Weather(name, fault.kind, until, fault.chance))
    else:
        _KINDS.get(fault.kind, _wish)(world, fault, name)


def _wish(world: World, fault: Fault, name: str) -> None:
    ask(world, Request(kind=fault.kind))  # type: ignore[arg-type]


def _compact(world: World, fault: Fault, name: str) -> None:
    try:
        world.invariants.store_changed()
        world.store.compact(world.store.revision)
    except StoreError:
        return


def _engine_death(world: World, fault: Fault, name: str) -> None:
    engine = world.engines[name]
    engine.die()
    world.kernel.after(min(fault.seconds, 6.0), engine.restart)


def _blackout(world: World, fault: Fault, name: str) -> None:
    for engine in world.engines.values():
        engine.die()
        world.kernel.after(fault.seconds, engine.restart)


def _corrupt(world: World, fault: Fault, name: str) -> None:
    done = [p for p in world.files if p.endswith("/committed.json")]
    path = done[-1].replace("committed.json", "trainer") if done else ""
    world.files.pop(path, None)
    world.remote.pop(path, None)


def _older(world: World, fault: Fault, name: str) -> None:
    found = sorted(key for key in world.invariants.now if key.startswith("checkpoints/"))
    ask(world, Request(kind="rollback", checkpoint=int(found[0].rsplit("/", 1)[1]) if found else 0))


def _clear(world: World, fault: Fault, name: str) -> None:
    world.network.weather.clear()


# -- what only somebody outside the protocol writes ----------------------------------------------------------


def _forge_vote(world: World, fault: Fault, name: str) -> None:
    """A vote by a life that was never made a voter, as an older program or a person would leave it."""
    round_ = world.invariants.now.get("rounds/current")
    if round_ is None:
        return
    vote = Vote(
        name=name,
        incarnation="zombie",
        timeline=round_["timeline"],
        round=round_["round"],
        state="saved",
        step=round_["step"],
        version=round_["version"],
    )
    world.store.txn(Txn((), (Put(world.keys.vote(round_["round"], name), encode(vote)),)))


def _forge_freeze(world: World, fault: Fault, name: str) -> None:
    """A freeze that no round owns."""
    world.invariants.forged = True
    absent = (Compare(world.keys.round, "create", "=", 0), Compare(world.keys.freeze, "create", "=", 0))
    freeze = Freeze(round=0, token=1, step=0, version=0)
    world.store.txn(Txn(absent, (Put(world.keys.freeze, encode(freeze)),)))
    world.invariants.store_changed()
    world.invariants.forged = False


def _relabel(world: World, fault: Fault, name: str) -> None:
    """A control call of an earlier life of the adapter lands on the engine."""
    engine = world.engines[name]
    engine.change("1.1.zombie", "other bytes")


# -- what must be so at a moment --------------------------------------------------------------------------------


def _must_fail(world: World, fault: Fault, name: str) -> None:
    health = world.invariants.now.get(f"health/{name}")
    if health is None or health["state"] != "failed":
        world.invariants.fail("verdict", f"{name} is dead for long and not failed: {health}")


def _must_live(world: World, fault: Fault, name: str) -> None:
    for key, health in world.invariants.now.items():
        if key.startswith("health/") and health["state"] == "failed":
            world.invariants.fail("verdict", f"{key} failed: {health['evidence']}")


def _must_match(world: World, fault: Fault, name: str) -> None:
    route, label = world.invariants.now.get(f"routes/{name}"), world.engines[name].label
    if route is not None and route["label"] != label:
        world.invariants.fail("I7", f"{name} has a route for {route['label']!r} and serves {label!r}")


def _leave(world: World, fault: Fault, name: str) -> None:
    ask(world, Request(kind="remove", name=name))


_KINDS: dict[str, Callable[[World, Fault, str], None]] = {
    "kill": lambda world, fault, name: world.kill(name, min(fault.seconds, 8.0)),
    "exit": lambda world, fault, name: world.exit(name, min(fault.seconds, 8.0)),
    "pause": lambda world, fault, name: world.pause(name, fault.seconds),
    "worker": lambda world, fault, name: world.pause(name, fault.seconds, beat=False),
    "beat": lambda world, fault, name: world.pause(name, fault.seconds, worker=False),
    "dam": lambda world, fault, name: world.network.dams.append(
        Dam(name, fault.key, world.kernel.now + fault.seconds)
    ),
    "full": lambda world, fault, name: setattr(
        world.network, "full_until", world.kernel.now + min(fault.seconds, 12.0)
    ),
    "compact": _compact,
    "clear": _clear,
    "engine_death": _engine_death,
    "engine_restart": lambda world, fault, name: world.engines[name].restart(),
    "engine_silent": lambda world, fault, name: setattr(
        world.engines[name], "silent_until", world.kernel.now + fault.seconds
    ),
    "flush": lambda world, fault, name: setattr(
        world.engines[name], "refuse_until", world.kernel.now + fault.seconds
    ),
    "blackout": _blackout,
    "poison": lambda world, fault, name: setattr(world, "poisoned", True),
    "corrupt": _corrupt,
    "older": _older,
    "leave": _leave,
    "forge_vote": _forge_vote,
    "forge_freeze": _forge_freeze,
    "relabel": _relabel,
    "must_fail": _must_fail,
    "must_live": _must_live,
    "must_match": _must_match,
}
"""The rest are wishes of an operator: checkpoint, rollback, hold, release."""
