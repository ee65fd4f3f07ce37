"""One beat for each rank: rank 0's keeps the trainer's lease, the others' keep a link to it and no lease."""

from __future__ import annotations

import secrets

import msgspec

from ..engine.config import JobConfig, Site
from ..engine.errors import SlackwaterError
from .ranklink import RankLink
from .services import RankBeat, Services
from .trainer_gang import Command, Gang, as_error
from .trainer_link import own_address

__all__ = ["make_beat"]


def make_beat(gang: Gang, services: Services, config: JobConfig, site: Site) -> RankBeat:
    """This rank's beat, called by every rank; rank 0 tells the others where its own listens.

    The caller closes it. Raises what rank 0 raised on every rank.
    """
    if gang.world_size == 1:
        return services.rank_beat(config, site, None)
    if gang.rank > 0:
        told = gang.broadcast(None)
        if told.kind == "error":
            name, text = msgspec.json.decode(told.payload)
            raise as_error([(0, name, text)])
        link = msgspec.json.decode(told.payload, type=RankLink)
        return services.rank_beat(config, site, msgspec.structs.replace(link, rank=gang.rank))
    try:
        link = RankLink(host=own_address(), port=0, token=secrets.token_hex(16), rank=0)
        beat = services.rank_beat(config, site, link)
    except SlackwaterError as error:
        gang.broadcast(Command("error", payload=msgspec.json.encode([type(error).__name__, str(error)])))
        raise
    link = msgspec.structs.replace(link, port=beat.link_port)
    gang.broadcast(Command("done", payload=msgspec.json.encode(link)))
    return beat
