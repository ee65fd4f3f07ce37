"""How a participant's process reaches its surroundings: etcd, the object store, and a beat of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.beatport import BeatPort
from ..engine.config import JobConfig, Site
from ..engine.ports import StateStore
from ..engine.upload import UploadStore

__all__ = ["Services", "default_services"]


@dataclass(frozen=True)
class Services:
    """Makers of what a participant stands on; another set takes their place in tests."""

    store: Callable[[Site], StateStore]
    objects: Callable[[Site], UploadStore | None]
    beat: Callable[[JobConfig, Site, str], BeatPort]


def default_services() -> Services:
    """etcd and S3 as the site names them, and a beat in a process of its own."""
    from .beat import BeatProcess
    from .stores import open_objects, open_store

    return Services(open_store, open_objects, lambda config, site, name: BeatProcess(site, config, name))
