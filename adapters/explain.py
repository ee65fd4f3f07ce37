"""Why the job is as it is, in sentences made from its records and history. Pure: no store, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.errors import NotFound
from ..engine.keys import TRAINER
from ..engine.model import Checkpoint, LogEntry
from ..engine.view import View
from .cli_status import summary

__all__ = [
    "explain_checkpoint",
    "explain_now",
    "explain_participant",
    "explain_recovery",
    "explain_round",
    "history",
]

History = Sequence[LogEntry]


def history(view: View) -> list[LogEntry]:
    """The job's bounded history, oldest first; an entry that cannot be read is left out."""
    prefix = view.keys.logs
    keys = sorted(key for key in view.kvs if key.startswith(prefix) and view.is_readable(key, LogEntry))
    found = (view.record(key, LogEntry) for key in keys)
    return [entry for entry in found if entry is not None]


# -- now ---------------------------------------------------------------------------------------------------


def explain_now(view: View) -> list[str]:
    """What the trainer waits for and who keeps it waiting, from the outermost cause inwards."""
    found = summary(view)
    told = []
    if found["leader"] is None:
        told.append(
            "No coordinator leads, so nothing is decided: no round, no verdict, no grant. "
            "Start one with `slackwater coordinator`."
        )
    told += [_sentence(reason) for reason in found["waits"]]
    if not found["waits"]:
        told.append(_running(view))
    told += [f"{text}." for text in _troubled(found["participants"])]
    told += _next_round(view)
    recovery = view.recovery
    if recovery is not None and recovery.phase == "needs_operator":
        told.append(
            "Mend the cause and say `slackwater retry`, or choose a checkpoint with `slackwater rollback --to N`."
        )
    return told


def _running(view: View) -> str:
    trainer = view.alive(TRAINER)
    if view.go is None or trainer is None:
        return "Nothing waits, and no trainer is there."
    return f"Nothing keeps the trainer waiting: it is at step {trainer.training_step} on timeline {view.timeline}."


def _troubled(participants: Sequence[dict[str, Any]]) -> list[str]:
    """What is known of every participant that is not well."""
    told = []
    for one in participants:
        if one["health"] in ("suspected", "failed", "exited"):
            why = f": {one['evidence']}" if one["evidence"] else ""
            told.append(f"{one['name']} on {one['host'] or 'an unknown host'} is {one['health']}{why}")
        elif one["role"] == "rollout" and one["route"] is None:
            what = one["waits_for"] or one["state"] or "silent"
            told.append(f"{one['name']} serves nobody: it has no route ({what})")
    return told


def _next_round(view: View) -> list[str]:
    round_ = view.round
    if round_ is None or round_.phase != "prepare":
        return []
    when = f"step {round_.not_before_step}" if round_.not_before_step else "the end of the current step"
    return [f"Round {round_.round} is announced for {when}; until then nothing stands for it."]


# -- one thing ---------------------------------------------------------------------------------------------


def explain_round(view: View, number: int) -> list[str]:
    """How a round ended, or how far it is. `NotFound` when neither etcd nor the history knows it."""
    entries = _about(history(view), round=number)
    told = [_dated(entry) for entry in entries]
    round_ = view.round
    if round_ is not None and round_.round == number:
        cut = (
            f"; it cuts step {round_.step} with version {round_.version}" if round_.phase != "prepare" else ""
        )
        told.append(f"Round {number} is open, in phase {round_.phase}{cut}.")
        told += [_sentence(w) for w in summary(view)["waits"] if w.startswith(f"round {number} ")]
        told += _next_round(view)
    told += [
        f"It became checkpoint {record.checkpoint} ({record.state})."
        for record in view.checkpoints().values()
        if record.round == number
    ]
    return told or _unknown(view, f"round {number}")


def explain_checkpoint(view: View, number: int) -> list[str]:
    """What became of a checkpoint: how it was made, whether a recovery could take it, and when one skipped it."""
    record = view.checkpoints().get(number)
    entries = _about(history(view), checkpoint=number)
    told = [_dated(entry) for entry in entries]
    for entry in history(view):
        skipped = entry.fields.get("skipped")
        if isinstance(skipped, dict) and str(number) in skipped and entry.fields.get("phase") == "resume":
            recovery = entry.fields.get("recovery")
            told.append(f"Recovery {recovery} went past it: {skipped[str(number)]}.")
    if record is not None:
        told.append(_standing(view, record))
    elif told:
        told.append(f"Checkpoint {number} has no record any more.")
    return told or _unknown(view, f"checkpoint {number}")


def _standing(view: View, record: Checkpoint) -> str:
    name = f"Checkpoint {record.checkpoint} (step {record.training_step}, version {record.weight_version})"
    if record.state == "deleting":
        return f"{name} is marked for deletion by retention; no recovery takes it."
    where = (
        "only on " + (record.host or "its host")
        if record.state == "committed"
        else f"in S3 at {record.remote}"
    )
    pinned = ", pinned" if record.pinned else ""
    if any(found.checkpoint == record.checkpoint for found in view.eligible()):
        return f"{name} is {record.state}{pinned}: {where}. A recovery may take it."
    return (
        f"{name} is {record.state}{pinned}: {where}. No recovery takes it: timeline {record.timeline} was left "
        "before it, so it is not on the lineage."
    )


def explain_recovery(view: View, number: int) -> list[str]:
    """What caused a recovery, where it went back to, what it skipped and how long each phase took."""
    told = [_dated(entry) for entry in _about(history(view), recovery=number)]
    recovery = view.recovery
    if recovery is not None and recovery.recovery == number:
        told.append(f"Recovery {number} is open, in phase {recovery.phase}: {recovery.cause}.")
        told += [f"Checkpoint {one} is skipped: {why}." for one, why in recovery.skipped.items()]
        told += [_sentence(w) for w in summary(view)["waits"] if w.startswith(f"recovery {number} ")]
    return told or _unknown(view, f"recovery {number}")


def explain_participant(view: View, name: str) -> list[str]:
    """What a participant does and every verdict on it that the history still has."""
    told = [_dated(entry) for entry in _about(history(view), participant=name)]
    for one in summary(view)["participants"]:
        if one["name"] == name:
            route = f", serves version {one['routed_version']} at {one['route']}" if one["route"] else ""
            waits = f", waits for {one['waits_for']}" if one["waits_for"] else ""
            why = f" ({one['evidence']})" if one["evidence"] else ""
            told.append(
                f"{name} is {one['health']}{why}: {one['state'] or 'silent'}, step {one['step']}, "
                f"version {one['weight_version']}{route}{waits}."
            )
    return told or _unknown(view, f"participant {name!r}")


# -- pieces ------------------------------------------------------------------------------------------------


def _about(entries: History, **field: Any) -> list[LogEntry]:
    ((name, value),) = field.items()
    return [entry for entry in entries if entry.fields.get(name) == value]


def _dated(entry: LogEntry) -> str:
    return f"{entry.at}: {entry.text}."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _unknown(view: View, what: str) -> list[str]:
    entries = history(view)
    since = f"it goes back to {entries[0].at}" if entries else "it is empty"
    raise NotFound(f"neither etcd nor the history of job {view.keys.job!r} knows {what}; {since}")
