"""The port of an experience buffer: what the buffer's participant asks of it, and all that a buffer of
one's own needs.

The participant calls these from one thread, in this order through a recovery: `fence`, `restore`,
`apply_freshness`;
in a round `cut`, and `committed` after the round's commit. `ExperienceBuffer` implements it; so may a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from .samples import BufferPart, FreshnessReport

__all__ = ["Buffer"]


class Buffer(Protocol):
    """A buffer that can be cut at a step and brought back to that cut.

    The contract is I13: after `restore` of the part that `cut(t)` returned, exactly what was trained at
    steps <= t
    counts as trained, everything else is still there or will be generated again.
    """

    @property
    def version(self) -> int:
        """Position in the buffer's own history: grows with every change, 0 when empty."""
        ...

    def fence(self, timeline: int, incarnation: str = "") -> None:
        """From now on refuse calls of lower timelines, durably, before returning.

        `incarnation` is the trainer's: its calls must carry it ("" accepts any). A repetition is no error.
        Raises
        `Fenced` when a higher timeline has been seen.
        """
        ...

    def cut(self, step: int, directory: Path) -> BufferPart:
        """Write the state as it was at `step_done(step)` into new files in `directory`, fsynced and hashed.

        The trainer may be steps ahead by now. Nothing is overwritten: an existing name is a `Conflict`,
        and so is a
        step that was not done or whose successor was committed already.
        """
        ...

    def committed(self, step: int) -> None:
        """A checkpoint of this step is committed: what only older cuts needed may go. Idempotent."""
        ...

    def restore(self, directory: Path, part: BufferPart | None, timeline: int) -> None:
        """Become what was cut (None: empty, as at the job's birth), for `timeline`, which `fence` named before.

        All or nothing, also when killed. Verifies every file against the part first: `CorruptCheckpoint` when one
        is missing or differs.
        """
        ...

    def apply_freshness(self, step_map: Mapping[int, int], training_step: int) -> FreshnessReport:
        """Take over the lineage's step map and treat stale and dead samples by the buffer's policy."""
        ...

    def statistics(self) -> dict[str, Any]:
        """JSON-ready figures for votes and metrics; at least `step`, `version` and `counts`."""
        ...

    def close(self) -> None:
        """Make everything durable and let go of files; idempotent."""
        ...
