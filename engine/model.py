"""The records that etcd holds, one class for each kind of key; all are small JSON that a person can read.

Times are for people only and never enter a decision. Unknown fields are ignored, so that a newer version's
records stay readable for an older one during an upgrade.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from .errors import StoreError

__all__ = [
    "Ack",
    "Alive",
    "Checkpoint",
    "CheckpointHead",
    "ConfigRecord",
    "Freeze",
    "Go",
    "Health",
    "Hold",
    "Lineage",
    "LogEntry",
    "ParticipantState",
    "Pin",
    "Participant",
    "Record",
    "Recovery",
    "Request",
    "Round",
    "RoundHead",
    "Route",
    "Sampling",
    "Serving",
    "Timeline",
    "Upload",
    "Vote",
    "WeightHead",
    "WeightVersion",
    "decode",
    "encode",
]

ParticipantState = Literal[
    "idle",
    "training",
    "rollout_in_progress",
    "syncing",
    "loading",
    "compiling",
    "ready",
    "saving",
    "held",
]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all records."""


class ConfigRecord(Record, frozen=True, kw_only=True):
    """`config`: who this job is and how it runs; written once, at its birth."""

    job_uid: str
    settings: dict[str, Any]
    created_at: str = ""


class Timeline(Record, frozen=True, kw_only=True):
    """`timeline`: the current timeline; it counts recoveries."""

    timeline: int


class Lineage(Record, frozen=True, kw_only=True):
    """`timelines/<T>`: where a timeline came from. Until `selected` it has no state of its own."""

    timeline: int
    parent: int
    selected: bool = False
    from_checkpoint: int = 0
    from_version: int = 0
    head_at_fence: int = 0
    cause: str = ""
    at: str = ""


class Participant(Record, frozen=True, kw_only=True):
    """`participants/<id>`: one registration. `ended` is "exited" (hard evidence) or "left" (a clean goodbye)."""

    name: str
    role: Literal["trainer", "rollout", "buffer"]
    incarnation: str
    timeline: int
    endpoint: str = ""
    host: str = ""
    pid: int = 0
    world_size: int = 1
    covers_step: int = -1  # buffer: the step up to which its durable log reaches
    ended: Literal["", "exited", "left"] = ""
    reason: str = ""
    at: str = ""


class Alive(Record, frozen=True, kw_only=True):
    """`alive/<id>`: under the participant's lease; rewritten only when it changes."""

    incarnation: str
    state: ParticipantState = "idle"
    training_step: int = 0
    weight_version: int = 0
    buffer_version: int = 0
    progress: int = 0
    waits_for: str = ""
    note: str = ""
    metrics: dict[str, float] = {}


class Health(Record, frozen=True, kw_only=True):
    """`health/<id>`: the leader's verdict on one incarnation. `observed_s` survives a change of leader."""

    incarnation: str
    state: Literal["alive", "suspected", "failed"]
    evidence: str = ""
    observed_s: float = 0.0
    at: str = ""


class Go(Record, frozen=True, kw_only=True):
    """`go`: the grant to train, for one incarnation on one timeline."""

    timeline: int
    incarnation: str
    buffer: str = ""
    from_step: int = 0


class Hold(Record, frozen=True, kw_only=True):
    """`hold/<reason>`: why the trainer must stand."""

    reason: str
    text: str = ""
    at: str = ""


class WeightHead(Record, frozen=True, kw_only=True):
    """`weights/head`: the newest accepted weight version."""

    version: int
    step: int
    timeline: int


class WeightVersion(Record, frozen=True, kw_only=True):
    """`weights/version/<v>`: one published set of weights; version -> step is the step map."""

    version: int
    step: int
    timeline: int
    kind: Literal["full", "delta"] = "full"
    base: int = 0
    location: str = ""
    digest: str = ""
    size_bytes: int = 0
    attempt: str = ""
    at: str = ""


class Serving(Record, frozen=True, kw_only=True):
    """`weights/serving`: the version that the fleet serves."""

    version: int
    timeline: int


class Sampling(Record, frozen=True, kw_only=True):
    """`sampling`: the parameters that clients send with every request."""

    revision: int = 0
    parameters: dict[str, Any] = {}


class Freeze(Record, frozen=True, kw_only=True):
    """`freeze`: set by the trainer's boundary transaction only; `token` is its round's create-revision."""

    round: int
    token: int
    step: int
    version: int
    path: str = ""


class RoundHead(Record, frozen=True, kw_only=True):
    """`round_head`: the last round's number, and the step that it was announced for on which timeline."""

    round: int
    not_before_step: int = 0
    timeline: int = 0


class Round(Record, frozen=True, kw_only=True):
    """`rounds/current`: one attempt at a checkpoint. `voters` (name -> incarnation) are fixed at the freeze."""

    round: int
    timeline: int
    phase: Literal["prepare", "ready", "save", "seal"] = "prepare"
    mode: Literal["overlap", "strict"] = "overlap"
    trigger: str = ""
    request: str = ""
    not_before_step: int = 0
    step: int = 0
    version: int = 0
    path: str = ""
    voters: dict[str, str] = {}
    dropped: tuple[str, ...] = ()
    observed_s: float = 0.0
    at: str = ""


class Vote(Record, frozen=True, kw_only=True):
    """`rounds/votes/<r>/<id>`: ready < saved < sealed, or failed. Digests name the files voted for."""

    name: str
    incarnation: str
    timeline: int
    round: int
    state: Literal["ready", "saved", "sealed", "failed"]
    step: int
    version: int
    buffer_version: int = 0
    host: str = ""
    path: str = ""
    digest: str = ""
    size_bytes: int = 0
    files: int = 0
    sampling_revision: int = 0
    statistics: dict[str, Any] = {}
    error: str = ""


class CheckpointHead(Record, frozen=True, kw_only=True):
    """`checkpoint_head`: the last checkpoint's id."""

    checkpoint: int


class Checkpoint(Record, frozen=True, kw_only=True):
    """`checkpoints/<n>`: a committed checkpoint. `remote` is its address once it is durable."""

    checkpoint: int
    timeline: int
    round: int
    training_step: int
    weight_version: int
    buffer_version: int
    path: str
    manifest_digest: str
    host: str = ""
    size_bytes: int = 0
    files: int = 0
    sampling_revision: int = 0
    state: Literal["committed", "durable", "deleting"] = "committed"
    remote: str = ""
    pinned: bool = False
    at: str = ""


class Upload(Record, frozen=True, kw_only=True):
    """`uploads/<n>/<incarnation>`: progress and result of an upload."""

    checkpoint: int
    incarnation: str
    state: Literal["uploading", "done", "failed", "removed"] = "uploading"
    bytes_done: int = 0
    bytes_total: int = 0
    remote: str = ""
    error: str = ""
    at: str = ""


class Recovery(Record, frozen=True, kw_only=True):
    """`recovery/current`: recovery k is the timeline that it creates."""

    recovery: int
    phase: Literal["fence", "select", "restore", "resync", "freshness", "needs_operator"] = "fence"
    cause: str = ""
    attempts: int = 0
    target: int = 0  # 0: the newest that verifies; else the checkpoint that an operator named
    request: str = ""
    checkpoint: int = 0
    skipped: dict[str, str] = {}
    trainer: str = ""
    buffer: str = ""
    note: str = ""
    observed_s: float = 0.0
    at: str = ""


class Ack(Record, frozen=True, kw_only=True):
    """`recovery/acks/<k>/<id>`: how far one participant has come. Not `ok`: `error` says why."""

    recovery: int
    name: str
    incarnation: str
    phase: Literal["fence", "restore", "freshness"]
    checkpoint: int = 0
    step: int = 0
    ok: bool = True
    unverified: bool = False
    error: str = ""
    found_data: str = ""  # where a `committed.json` of this job lies, if one was found
    report: dict[str, Any] = {}


class Route(Record, frozen=True, kw_only=True):
    """`routes/<rollout>`: an engine that has proven `version` and may be sent requests."""

    name: str
    url: str
    version: int
    timeline: int
    incarnation: str
    label: str = ""


class Pin(Record, frozen=True, kw_only=True):
    """`pins/<id>`: what a reader is using; 0 is nothing."""

    name: str
    version: int = 0
    checkpoint: int = 0


class Request(Record, frozen=True, kw_only=True):
    """`requests/<uuid>`: an operator's wish. Put with state `new`; the leader writes the rest."""

    kind: Literal["checkpoint", "rollback", "hold", "release", "retry", "remove", "sampling", "pin", "unpin"]
    state: Literal["new", "accepted", "done", "refused"] = "new"
    checkpoint: int = 0
    name: str = ""
    parameters: dict[str, Any] = {}
    answer: str = ""
    by: str = ""
    at: str = ""


class LogEntry(Record, frozen=True, kw_only=True):
    """`log/<seq>`: one line of the bounded history."""

    kind: str
    text: str
    fields: dict[str, Any] = {}
    timeline: int = 0
    epoch: int = 0
    at: str = ""


R = TypeVar("R", bound=Record)
_DECODERS: dict[type[Record], msgspec.json.Decoder[Any]] = {}
_ENCODER = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return _ENCODER.encode(record)


def decode(kind: type[R], value: bytes, key: str = "") -> R:
    """A record from JSON; `StoreError` names the key when it is not one."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind)
    try:
        record: R = decoder.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(f"{key or kind.__name__}: not a valid {kind.__name__} record: {error}") from error
    return record
