"""Removes the files of checkpoints that the leader has marked `deleting`, on this host and in the bucket."""

from __future__ import annotations

import structlog

from ..engine.errors import SlackwaterError
from ..engine.filetier import FileTier
from ..engine.manifest import COMMITTED_NAME, MANIFEST_NAME
from ..engine.model import Checkpoint, Upload
from ..engine.ports import ObjectStore
from ..engine.trainerrole import TrainerRole
from ..engine.view import View

__all__ = ["Janitor"]


class Janitor:
    """Sweeps for one trainer: its host's local tier and the bucket it uploads to. Call `sweep` now and then.

    Only a record that etcd shows as `deleting` is touched: the mark is irrevocable, so a sweep that comes late does
    no harm. The manifest goes first, so that a half-removed checkpoint can be taken for nothing else.
    """

    def __init__(self, role: TrainerRole, host: str, tier: FileTier, objects: ObjectStore | None) -> None:
        self._role = role
        self._host = host
        self._tier = tier
        self._objects = objects
        self._log = structlog.get_logger().bind(participant="trainer")

    def sweep(self, view: View) -> int:
        """Remove what is marked and report it; returns how many. Blocks for the removals; errors wait for the next."""
        removed = 0
        for record in view.checkpoints().values():
            if record.state != "deleting":
                continue
            try:
                self._remove(record)
                removed += 1
            except SlackwaterError as error:
                self._log.warning("not removed yet", checkpoint=record.checkpoint, error=str(error))
        return removed

    def _remove(self, record: Checkpoint) -> None:
        if record.host in ("", self._host):
            self._tier.remove(record.path)  # another host's files are gone with it, or its own affair
        if self._objects is not None:
            for name in (COMMITTED_NAME, MANIFEST_NAME):
                self._objects.delete(f"{record.path}/{name}")
            for found in list(self._objects.list(f"{record.path}/")):
                self._objects.delete(found.key)
        incarnation = self._role.membership.incarnation
        self._role.upload(Upload(checkpoint=record.checkpoint, incarnation=incarnation, state="removed"))
