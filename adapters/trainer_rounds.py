"""Rank 0's part in an open round: votes, the manifest, and what is left beside the data after the commit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import structlog

from ..engine.digest import sha256_text
from ..engine.errors import LeaseLost, NoSpace, SlackwaterError, Unavailable
from ..engine.filetier import FileTier
from ..engine.keys import BUFFER
from ..engine.manifest import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    Committed,
    Header,
    VersionVector,
    decode_part,
    encode_json,
    manifest_digest,
    merge_manifest,
)
from ..engine.model import Checkpoint, Lineage, LogEntry, Round, Vote
from ..engine.trainerrole import TrainerRole
from ..engine.view import View
from .trainer_link import PartLink

__all__ = ["OpenSave", "RoundDriver", "committed_bytes"]


@dataclass(kw_only=True)
class OpenSave:
    """One accepted cut whose round is still open; `blocked_s` is how long training stood for it."""

    header: Header
    token: int
    path: str
    blocked_s: float
    parts: dict[int, bytes] = field(default_factory=dict)
    failure: str = ""


class RoundDriver:
    """Called on news by one thread; `begin` and `wait_closed` by the training thread.

    A new cut may come before the end of the last round was served: each save is open until its own end was told.
    """

    def __init__(
        self,
        role: TrainerRole,
        tier: FileTier,
        link: PartLink,
        world_size: int,
        committed: Callable[[Checkpoint], None],
    ) -> None:
        self._role, self._tier, self._link = role, tier, link
        self._world_size = world_size
        self._committed = committed
        self._lock = threading.Lock()
        self._saves: list[OpenSave] = []
        self._closed = threading.Event()
        self._closed.set()
        self._log = structlog.get_logger().bind(participant="trainer")

    @property
    def open(self) -> bool:
        """Whether a save waits for files, votes or the end of its round."""
        return bool(self._saves)

    def begin(self, save: OpenSave) -> None:
        """The cut was accepted: from now on drive its round."""
        with self._lock:
            self._saves.append(save)
            self._closed.clear()

    def wait_closed(self, timeout_seconds: float) -> bool:
        """Wait for the end of every open round; False when it did not come in time."""
        return self._closed.wait(timeout_seconds)

    def step(self, view: View) -> None:
        """Do what is due. `Unavailable`, `LeaseLost` and a full etcd are left for the next call."""
        if view.revision < self._role.membership.written_revision:
            return
        for save in tuple(self._saves):
            self._step(view, save)

    def _step(self, view: View, save: OpenSave) -> None:
        round_ = view.round
        try:
            if round_ is None or view.create(view.keys.round) != save.token:
                self._end(view, save)
            elif round_.voters:
                self._serve(view, round_, save)
        except (Unavailable, LeaseLost, NoSpace) as error:
            self._log.warning("the round waits", round=save.header.round, reason=str(error))

    # -- votes ---------------------------------------------------------------------------------------------

    def _serve(self, view: View, round_: Round, save: OpenSave) -> None:
        task = self._role.round_task(view)
        if task == "none":
            return
        self._collect(save)
        if save.failure:
            self._vote(round_, save, "failed", error=save.failure[:1000])
        elif task == "ready":
            self._vote(round_, save, "ready")
        elif task == "save" and len(save.parts) == self._world_size:
            lists = b"".join(save.parts[rank] for rank in sorted(save.parts))
            self._vote(round_, save, "saved", digest=sha256_text(lists))
        elif task == "seal":
            try:
                self._seal(view, round_, save)
            except (Unavailable, LeaseLost):
                raise
            except SlackwaterError as error:
                save.failure = f"rank 0: the manifest: {error}"
                self._vote(round_, save, "failed", error=save.failure[:1000])

    def _collect(self, save: OpenSave) -> None:
        failures = []
        for rank in range(self._world_size):
            if rank not in save.parts:
                found = self._link.part(save.header.round, rank)
                if found is not None and found[1]:
                    failures.append(found[1])
                elif found is not None:
                    save.parts[rank] = found[0]
        save.failure = save.failure or "; ".join(failures)

    def _seal(self, view: View, round_: Round, save: OpenSave) -> None:
        parts = [decode_part(raw, f"the list of rank {rank}") for rank, raw in sorted(save.parts.items())]
        buffer_version = 0
        buffer_vote = view.votes(round_.round).get(BUFFER)
        if BUFFER in round_.voters and buffer_vote is not None:
            raw = self._tier.read_json(f"{save.path}/part-buffer.json")
            if sha256_text(raw) != buffer_vote.digest:
                raise SlackwaterError("the buffer's list of files is not the one that it voted for")
            parts.append(decode_part(raw, "the buffer's list"))
            buffer_version = buffer_vote.buffer_version
        vector = VersionVector(
            training_step=round_.step, weight_version=round_.version, buffer_version=buffer_version
        )
        header = msgspec.structs.replace(
            save.header,
            vector=vector,
            step_map={str(version): step for version, step in view.step_map().items()},
            sampling=dict(view.sampling.parameters),
        )
        manifest = merge_manifest(header, parts)
        encoded = encode_json(manifest)
        self._tier.write_json(f"{save.path}/{MANIFEST_NAME}", encoded)
        self._vote(
            round_,
            save,
            "sealed",
            digest=manifest_digest(encoded),
            size_bytes=sum(file.size_bytes for file in manifest.files),
            files=len(manifest.files),
        )

    def _vote(self, round_: Round, save: OpenSave, state: str, **fields: object) -> None:
        me = self._role.membership
        vote = Vote(
            name=me.name,
            incarnation=me.incarnation,
            timeline=me.timeline,
            round=round_.round,
            state=state,  # type: ignore[arg-type]  # one of the four literals above
            step=round_.step,
            version=round_.version,
            host=socket.gethostname(),
            path=save.path,
            statistics={"blocked_s": round(save.blocked_s, 4)},
            **fields,  # type: ignore[arg-type]  # checked by the record's own types where they are made
        )
        self._role.vote(save.token, vote)

    # -- the end -------------------------------------------------------------------------------------------

    def _end(self, view: View, save: OpenSave) -> None:
        number = save.header.round
        record = next((c for c in view.checkpoints().values() if c.path == save.path), None)
        if record is not None:
            self._leave_record(view, save, record)
            self._link.tell(number, "")
            self._log.info("checkpoint", checkpoint=record.checkpoint, step=record.training_step)
            self._committed(record)
        else:
            reason = save.failure or _abort_reason(view, number)
            self._link.tell(number, reason or "the round was aborted")
            if self._world_size > 1 or not reason:
                self._log.warning("round aborted", round=number, reason=reason)
        self._link.forget(number)
        with self._lock:
            self._saves.remove(save)
            if not self._saves:
                self._closed.set()

    def _leave_record(self, view: View, save: OpenSave, record: Checkpoint) -> None:
        """Put `committed.json` beside the data. The commit stands without it: whoever joins next repairs it."""
        try:
            self._tier.write_json(f"{save.path}/{COMMITTED_NAME}", committed_bytes(view, save.header, record))
        except SlackwaterError as error:
            self._log.error("committed.json is missing for now", path=save.path, error=str(error))


def _abort_reason(view: View, number: int) -> str:
    for entry in reversed(view.under(view.keys.logs, LogEntry).values()):
        if entry.kind == "abort" and entry.fields.get("round") == number:
            return str(entry.fields.get("reason", ""))
    return ""


def committed_bytes(view: View, header: Header, record: Checkpoint) -> bytes:
    """`committed.json`: the record and the timelines on its path to the root."""
    lineage = []
    timeline = record.timeline
    while timeline > 0:
        found = view.record(view.keys.timeline_record(timeline), Lineage)
        if found is None:
            break
        lineage.append(msgspec.to_builtins(found))
        timeline = found.parent
    return encode_json(
        Committed(
            checkpoint=record.checkpoint,
            job=header.job,
            job_uid=header.job_uid,
            timeline=record.timeline,
            manifest_digest=record.manifest_digest,
            record=msgspec.to_builtins(record),
            lineage=tuple(lineage),
        )
    )
