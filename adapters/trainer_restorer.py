"""Restoring a checkpoint on every rank: its manifest and files from this host or the object store, verified first."""

from __future__ import annotations

import shutil

from ..engine.errors import CorruptCheckpoint, NotFound, SlackwaterError
from ..engine.filetier import FileTier
from ..engine.model import Checkpoint
from ..engine.ports import ObjectStore
from ..engine.reader import CheckpointReader
from .rng import RngState
from .torchstate import TrainState
from .trainer_manifest import open_sources, read_manifest

__all__ = ["restore_state"]


def restore_state(
    state: TrainState, record: Checkpoint, tier: FileTier, objects: ObjectStore | None, seed: int
) -> tuple[list[str], str]:
    """Load a checkpoint into this rank's objects; returns (remarks for people, which tiers were read).

    Raises `CorruptCheckpoint` (nothing was loaded: try an older one) or `StateMismatch`.
    """
    manifest = read_manifest(record, tier, objects)
    cache = tier.root / ".fetch" / str(state.rank) / record.manifest_digest.partition(":")[2][:16]
    try:
        with CheckpointReader(manifest, open_sources(record, tier, objects, cache)) as reader:
            try:
                remarks = state.restore(reader)
            except SlackwaterError as error:
                if isinstance(error, NotFound):
                    raise CorruptCheckpoint(str(error)) from error
                raise
            tiers = sorted({used.split(";")[0] for used in reader.used.values()})
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    if manifest.world_size != state.world_size:
        RngState.derive(seed, record.training_step, state.rank)
        remarks.append(
            f"random generators derived from the seed: {manifest.world_size} ranks saved, {state.world_size} are here"
        )
    return remarks, ", ".join(tiers) or "none"
