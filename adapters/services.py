"""How a participant's process reaches its surroundings: etcd, the object store, and a beat of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..engine.beatport import BeatPort
from ..engine.config import JobConfig, Site
from ..engine.filetier import FileTier
from ..engine.keys import TRAINER
from ..engine.ports import StateStore
from ..engine.tensorfile import FileSystem
from ..engine.upload import UploadStore
from .ranklink import RankLink

__all__ = ["RankBeat", "Services", "default_services"]


class RankBeat(BeatPort, Protocol):
    """The beat of one rank of a gang: with a link, the end of any rank ends the life of all."""

    @property
    def link_port(self) -> int:
        """Rank 0: the port that the other ranks' beats connect to; 0 without a link."""
        ...

    def abandon(self) -> None:
        """Stop as after a crash: the others hear that this rank ended. Blocks like `close`; idempotent."""
        ...


@dataclass(frozen=True)
class Services:
    """Makers of what a participant stands on; another set takes their place in tests."""

    store: Callable[[Site], StateStore]
    objects: Callable[[Site], UploadStore | None]
    tier: Callable[[Site, FileSystem | None], FileTier]
    beat: Callable[[JobConfig, Site, str], BeatPort]
    rank_beat: Callable[[JobConfig, Site, RankLink | None], RankBeat]


def default_services() -> Services:
    """etcd, S3 and the local directory as the site names them, and a beat in a process of its own."""
    from .beat import BeatProcess
    from .stores import open_objects, open_store, open_tier

    return Services(
        store=open_store,
        objects=open_objects,
        tier=open_tier,
        beat=lambda config, site, name: BeatProcess(site, config, name),
        rank_beat=lambda config, site, link: BeatProcess(site, config, TRAINER, link=link),
    )
