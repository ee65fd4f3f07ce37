"""How a participant's process reaches its surroundings: etcd, the object store, and a beat of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.beatport import BeatPort
from ..engine.config import JobConfig, Site
from ..engine.filetier import FileTier
from ..engine.ports import StateStore
from ..engine.tensorfile import FileSystem
from ..engine.upload import UploadStore

__all__ = ["Services", "default_services"]


@dataclass(frozen=True)
class Services:
    """Makers of what a participant stands on; another set takes their place in tests."""

    store: Callable[[Site], StateStore]
    objects: Callable[[Site], UploadStore | None]
    tier: Callable[[Site, FileSystem | None], FileTier]
    beat: Callable[[JobConfig, Site, str], BeatPort]


def default_services() -> Services:
    """etcd, S3 and the local directory as the site names them, and a beat in a process of its own."""
    from .beat import BeatProcess
    from .stores import open_objects, open_store, open_tier

    return Services(
        open_store, open_objects, open_tier, lambda config, site, name: BeatProcess(site, config, name)
    )
