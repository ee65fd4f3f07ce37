"""Taking a participant's slot: a dead holder's lease is waited for, a living holder is an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..engine.errors import SlotOccupied
from ..engine.membership import Membership
from ..engine.model import Alive
from ..engine.ports import StateStore

__all__ = ["join_when_free"]

_RETRY_S = 0.2


def join_when_free(
    store: StateStore,
    membership: Membership,
    lease_s: float,
    alive: Callable[[], Alive],
    covers_step: Callable[[], int] = lambda: -1,
) -> None:
    """Register; while the slot is taken, wait until a dead holder's lease must be over.

    `alive` and `covers_step` are asked anew for each try, so that a registration never says what was true before a
    wait. Raises `SlotOccupied` when the holder lives, and whatever `Membership.join` raises.
    """
    deadline = time.monotonic() + lease_s + 1
    pause = threading.Event()
    key = membership.keys.alive(membership.name)
    while True:
        while store.get(key) is not None and time.monotonic() < deadline:
            pause.wait(_RETRY_S)
        try:
            membership.join(alive(), covers_step=covers_step())
            return
        except SlotOccupied as error:
            if time.monotonic() >= deadline:
                raise SlotOccupied(f"{error}; stop it first, or take another job name") from error
