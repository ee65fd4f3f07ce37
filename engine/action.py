"""One decision of the leader: a guarded transaction, and what to write down once it took effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import model
from .ports import Compare, Delete, Op, Put

__all__ = ["Action", "delete", "put"]


@dataclass(frozen=True, slots=True)
class Action:
    """A transaction without the leader's own guard, which the coordinator adds to every one.

    `log` is (kind, text, fields) of the history entry; it is written apart, after success, so that an action of
    deletes only stays one (a full store still accepts it).
    """

    name: str
    compares: tuple[Compare, ...]
    ops: tuple[Op, ...]
    log: tuple[str, str, dict[str, Any]] | None = field(default=None)


def put(key: str, record: model.Record, lease: int = 0) -> Put:
    """Write a record."""
    return Put(key, model.encode(record), lease)


def delete(key: str, *, prefix: bool = False) -> Delete:
    """Delete a key or a prefix."""
    return Delete(key, prefix)
