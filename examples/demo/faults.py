"""The fault schedule: one kill after the other, each only when the one before has healed."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Protocol

from slackwater.engine.keys import TRAINER

from .stack import Stack
from .watch import Observer

__all__ = ["Fault", "KillLeader", "KillRollout", "KillTrainer", "Measured", "Schedule"]


@dataclass
class Measured:
    """One fault as it was seen; times are CLOCK_MONOTONIC seconds, 0 when it has not come yet."""

    kind: str
    victim: str = ""
    at: float = 0.0
    detected_at: float = 0.0
    recovered_at: float = 0.0
    detail: str = ""


class Fault(Protocol):
    """One kill: when it may strike, how it strikes, and how one sees that it was noticed and healed."""

    measured: Measured

    def strike(self) -> bool:
        """Try; False when this is not the moment."""
        ...

    def detected(self) -> bool:
        """Whether the job has noticed."""
        ...

    def recovered(self) -> bool:
        """Whether the job is whole again."""
        ...


class KillLeader:
    """kill -9 the coordinator that leads."""

    def __init__(self, stack: Stack, observer: Observer) -> None:
        self.measured = Measured("leading coordinator")
        self._stack, self._observer = stack, observer
        self._key, self._epoch = "", 0

    def strike(self) -> bool:
        """Kill whoever has the lowest create-revision."""
        key, identity = self._observer.leader
        if not key or identity["id"] not in self._stack.children:
            return False
        self._key, self._epoch = key, self._observer.view.create(key)
        self.measured.victim = identity["id"]
        self._stack.kill(identity["id"])
        return True

    def detected(self) -> bool:
        """Its key is gone, and another candidate is first."""
        key, identity = self._observer.leader
        self.measured.detail = f"{identity.get('id', '')} leads"
        return bool(key) and key != self._key

    def recovered(self) -> bool:
        """The new leader has acted: its epoch stands in the log."""
        return any(entry.epoch > self._epoch for entry in self._observer.log[-20:])


class KillRollout:
    """kill -9 one rollout server with its scheduler."""

    def __init__(self, stack: Stack, observer: Observer, name: str) -> None:
        self.measured = Measured("rollout server", name)
        self._stack, self._observer = stack, observer

    def strike(self) -> bool:
        """Kill it while it has a route."""
        if self.measured.victim not in self._observer.view.routes():
            return False
        self._stack.kill(self.measured.victim)
        return True

    def detected(self) -> bool:
        """Its route is gone; nobody asks it any more."""
        return self.measured.victim not in self._observer.view.routes()

    def recovered(self) -> bool:
        """It has proven the weights and has a route again."""
        route = self._observer.view.routes().get(self.measured.victim)
        self.measured.detail = f"serves version {route.version}" if route is not None else ""
        return route is not None


class KillTrainer:
    """SIGKILL every rank of the trainer in the middle of a step: it has gradients, the weights are not updated yet."""

    def __init__(self, stack: Stack, observer: Observer) -> None:
        self.measured = Measured("trainer")
        self._stack, self._observer = stack, observer
        self._timeline, self._pid = 0, 0
        self.last_step = 0

    def strike(self) -> bool:
        """Stop the gang, look whether it stands between gradients and update, and kill it there; else let it go on."""
        observer, gang = self._observer, self._stack.gang
        if observer.view.last_checkpoint < 1 or not 3 <= observer.step % 10 <= 8:
            return False
        gang.signal(signal.SIGSTOP)
        observer.new_events()
        if observer.inside != observer.step + 1:
            gang.signal(signal.SIGCONT)
            return False
        self.last_step, self._timeline = observer.step, observer.view.timeline
        self.measured.victim = f"trainer in step {observer.inside}, before its update"
        gang.signal(signal.SIGKILL)
        return True

    def detected(self) -> bool:
        """A verdict, the end of its registration, or a recovery that has begun."""
        view = self._observer.view
        trainer = view.participant(TRAINER)
        gone = trainer is None or bool(trainer.ended) or view.alive(TRAINER) is None
        return gone or view.timeline > self._timeline

    def recovered(self) -> bool:
        """A step has been trained on the new timeline."""
        view = self._observer.view
        if view.timeline <= self._timeline or view.go is None:
            return False
        history = self._observer.history
        restored = [e.at for e in history if e.kind == "digest" and e.fields["when"] == "restore"]
        steps = [e.at for e in history if e.kind == "step" and restored and e.at > restored[-1]]
        self.measured.detail = f"timeline {view.timeline}, again from step {view.go.from_step}"
        return bool(steps) and restored[-1] > self.measured.at


class Schedule:
    """Strikes one fault at a time: not before its step, and only in a job that is whole."""

    def __init__(self, faults: list[tuple[int, Fault]]) -> None:
        self._waiting = list(faults)
        self._open: Fault | None = None
        self.done: list[Fault] = []

    @property
    def over(self) -> bool:
        """Whether every fault has struck and healed."""
        return not self._waiting and self._open is None

    @property
    def struck(self) -> Fault | None:
        """The fault that has struck and not healed yet."""
        return self._open

    def act(self, step: int, whole: bool) -> list[tuple[str, Fault]]:
        """Strike, or look how far the struck one has healed; what happened: `struck`, `detected`, `recovered`."""
        fault = self._open
        if fault is None:
            if (
                not self._waiting
                or step < self._waiting[0][0]
                or not whole
                or not self._waiting[0][1].strike()
            ):
                return []
            _, fault = self._waiting.pop(0)
            fault.measured.at = time.monotonic()
            self._open = fault
            return [("struck", fault)]
        happened = []
        if not fault.measured.detected_at and fault.detected():
            fault.measured.detected_at = time.monotonic()
            happened.append(("detected", fault))
        if fault.measured.detected_at and fault.recovered():
            fault.measured.recovered_at = time.monotonic()
            self._open = None
            self.done.append(fault)
            happened.append(("recovered", fault))
        return happened
