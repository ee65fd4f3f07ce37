"""The port between a worker and its beat: what the worker tells, and the deadline that it reads."""

from __future__ import annotations

from typing import Protocol

from .model import Alive

__all__ = ["BeatPort", "Registered"]


class Registered(Protocol):
    """What a beat must know of a registration: a `Membership`, seen from below."""

    @property
    def timeline_mod(self) -> int:
        """Mod-revision of `timeline` as joined or acknowledged."""
        ...

    @property
    def registration_mod(self) -> int:
        """Mod-revision of our registration."""
        ...

    @property
    def alive_create(self) -> int:
        """Create-revision of our liveness key."""
        ...


class BeatPort(Protocol):
    """A beat that keeps one participant's lease. Methods return at once unless said otherwise; thread-safe."""

    def open(self) -> int:
        """Start beating and return the lease for a registration to come. Blocks until the lease is granted.

        Calling it again after `lost` begins a new life with a new lease.
        """
        ...

    def adopt(self, registered: Registered, alive: Alive) -> None:
        """From now on keep this registration's liveness key, beginning with `alive`.

        Called again after each acknowledgement of a timeline.
        """
        ...

    def report(self, alive: Alive) -> None:
        """The worker's newest report; the beat writes it when it differs. The latest wins."""
        ...

    def tick(self) -> None:
        """The worker made progress (a step, a layer loaded, a file written). Costs well under a microsecond."""
        ...

    def alive(self) -> bool:
        """Whether effects outside the process are allowed now: the lease's local deadline lies ahead."""
        ...

    @property
    def lease(self) -> int:
        """The lease that our own keys are put under; changes when the same life takes a new one."""
        ...

    @property
    def lost(self) -> str:
        """Why this life is over; empty while it is not."""
        ...

    @property
    def alive_create(self) -> int:
        """Create-revision of our liveness key; changes when the same life takes a new lease. 0 or less: none now."""
        ...

    def close(self) -> None:
        """Stop beating and revoke the lease. Blocks for at most one TTL; idempotent."""
        ...
