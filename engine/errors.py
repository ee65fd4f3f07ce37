"""Every error that Slackwater raises on purpose, in one tree.

    SlackwaterError
    |-- ConfigError             a setting or an argument is impossible (exit code 2)
    |-- Refused                 the job does not admit this process (exit code 2)
    |   `-- SlotOccupied        another live incarnation holds the slot
    |-- Unavailable             outcome unknown: read back before retrying
    |-- Conflict                a definite no: nothing was written
    |   `-- Fenced              ... because a newer timeline, incarnation or leader is in charge
    |       `-- NotLeader
    |-- LeaseLost               our lease cannot be renewed any more: stop every effect
    |-- StoreError              a definite, non-transient answer of a store
    |   |-- AuthFailed
    |   |-- NoSpace             the store is over its quota, or a disk is full
    |   |-- Compacted           the asked revision is gone: list again
    |   |-- StoreRewound        the store went backwards or is another cluster
    |   `-- NotFound
    |-- CorruptCheckpoint       bytes do not match what was recorded, or are missing
    |-- StateMismatch           names, shapes or dtypes of two states differ
    |-- UnsupportedState        an object that cannot be saved without pickle
    |-- EngineFault             a rollout engine did anything but a proven success
    |-- StagingBusy             every staging arena is in use: this save does not start
    `-- DeadlineExceeded        a wait ran out

"No" and "don't know" are different answers: `Conflict` is a no, `Unavailable` is a don't know.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AuthFailed",
    "Compacted",
    "ConfigError",
    "Conflict",
    "CorruptCheckpoint",
    "DeadlineExceeded",
    "EngineFault",
    "Fenced",
    "LeaseLost",
    "NoSpace",
    "NotFound",
    "NotLeader",
    "Refused",
    "SlackwaterError",
    "SlotOccupied",
    "StagingBusy",
    "StateMismatch",
    "StoreError",
    "StoreRewound",
    "Unavailable",
    "UnsupportedState",
]


class SlackwaterError(Exception):
    """Root of the tree; catch this to catch all of ours."""


class ConfigError(SlackwaterError):
    """A setting or an argument is impossible; the message names it and the rule that it breaks."""


class Refused(SlackwaterError):
    """The job does not admit this process (other identity, other cluster, job already over)."""


class SlotOccupied(Refused):
    """Another live incarnation holds the participant's slot."""


class Unavailable(SlackwaterError):
    """The outcome of a call is unknown; a writer reads back before it tries again."""


class Conflict(SlackwaterError):
    """A guarded write was refused: a compare failed, nothing was written."""


class Fenced(Conflict):
    """A newer timeline, incarnation or leader is in charge; the caller must stop acting."""


class NotLeader(Fenced):
    """The caller's epoch is not the leader's any more."""


class LeaseLost(SlackwaterError):
    """The lease could not be renewed before its local deadline."""


class StoreError(SlackwaterError):
    """A definite answer of a store that retrying will not change."""


class AuthFailed(StoreError):
    """Wrong or expired credentials, or no permission for this key."""


class NoSpace(StoreError):
    """The store is over its quota or the disk is full; nothing was written."""


class Compacted(StoreError):
    """The asked revision has been compacted away; list again and go on from there."""

    def __init__(self, message: str, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class StoreRewound(StoreError):
    """The store's revision is below one that we saw, or it is another cluster: a restored backup."""


class NotFound(StoreError):
    """The object or bucket does not exist, or is not permitted to be seen."""


class CorruptCheckpoint(SlackwaterError):
    """Bytes are missing or do not match their recorded digest."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StateMismatch(SlackwaterError):
    """Two states differ in names, shapes or dtypes; nothing was loaded."""

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        changed: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.changed = tuple(changed)


class UnsupportedState(SlackwaterError):
    """An object that cannot be stored as tensors or typed JSON; `path` names it."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class EngineFault(SlackwaterError):
    """A rollout engine did anything but a proven success; `reply` keeps what it said."""

    def __init__(self, message: str, reply: str = "") -> None:
        super().__init__(message)
        self.reply = reply


class StagingBusy(SlackwaterError):
    """Every staging arena is in use; this save does not start, and nothing was copied."""


class DeadlineExceeded(SlackwaterError):
    """A wait ran out of time."""
