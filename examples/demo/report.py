"""What a run has shown: `demo-report.json` and the table at its end."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from rich.table import Table

from slackwater.engine.keys import BUFFER
from slackwater.engine.model import Checkpoint
from slackwater.engine.view import View

from .events import Event
from .faults import Fault
from .watch import Observer

__all__ = ["make_report", "table", "unmet"]

_MEAN_OVER = 10


def make_report(
    observer: Observer, faults: list[Fault], freezes: list[float], *, engine: str, seconds: float
) -> dict[str, Any]:
    """Everything that was measured, ready for JSON."""
    view, history = observer.view, observer.history
    rewards = [reward for _, reward in sorted(observer.rewards.items())]
    checkpoints = view.checkpoints()
    resumed = _resumed(history, checkpoints)
    trained = [event for event in history if event.kind == "step"]
    refused = [event.fields for event in history if event.kind == "refused"]
    boundaries = [e.fields["seconds"] for e in history if e.kind == "boundary"]
    saved = {record.training_step for record in checkpoints.values()}
    blocked = [e.fields["seconds"] for e in history if e.kind == "boundary" and e.fields["step"] in saved]
    head = view.head
    return {
        "rollout_engine": engine,
        "seconds": round(seconds, 1),
        "steps": observer.step,
        "timeline": view.timeline,
        "version_vector": {
            "training_step": observer.step,
            "weight_version": head.version if head is not None else 0,
            "buffer_version": _buffer_version(view, checkpoints),
        },
        "checkpoints_committed": view.last_checkpoint,
        "checkpoints_durable": sum(entry.kind == "durable" for entry in observer.log),
        "checkpoints": [_checkpoint(record) for record in checkpoints.values()],
        "faults": [_fault(fault) for fault in faults],
        "steps_repeated": len(trained) - len(observer.rewards),
        "resumed_from": resumed,
        "state_digest_at_checkpoint": _digest(history, resumed["step"], "checkpoint"),
        "state_digest_after_restore": _digest(history, resumed["step"], "restore"),
        "freeze_s": _spread(freezes),
        "blocked_s": _spread(blocked),
        "boundary_s": _spread(boundaries),
        "step_s": _spread([event.fields["seconds"] for event in trained]),
        "reward_first": round(fmean(rewards[:_MEAN_OVER]), 4) if rewards else 0.0,
        "reward_last": round(fmean(rewards[-_MEAN_OVER:]), 4) if rewards else 0.0,
        "mixed_version_samples_trained": sum(event.fields["mixed"] for event in trained),
        "mixed_version_samples_refused": sum(fields.get("mixed", 0) for fields in refused),
    }


def unmet(report: dict[str, Any]) -> list[str]:
    """What a good run would have shown and this one has not."""
    promises = {
        "three faults were healed": len(report["faults"]) == 3
        and all(f["recovered_s"] for f in report["faults"]),
        "the reward rose": report["reward_last"] > report["reward_first"],
        "the restored state is the saved one": report["state_digest_after_restore"] != ""
        and report["state_digest_after_restore"] == report["state_digest_at_checkpoint"],
        "no sample of mixed versions was trained": report["mixed_version_samples_trained"] == 0,
        "checkpoints became durable": report["checkpoints_durable"] > 0,
    }
    return [promise for promise, kept in promises.items() if not kept]


def table(report: dict[str, Any]) -> Table:
    """The figures that a person wants to see."""
    shown = Table(title="What this run has shown", show_header=False)
    vector, resumed = report["version_vector"], report["resumed_from"]
    shown.add_row("rollout engine", report["rollout_engine"])
    shown.add_row(
        "version vector",
        f"step {vector['training_step']}, weights {vector['weight_version']}, buffer {vector['buffer_version']}, "
        f"timeline {report['timeline']}",
    )
    shown.add_row(
        "reward, first and last 10 steps", f"{report['reward_first']:.2f} -> {report['reward_last']:.2f}"
    )
    for record in report["checkpoints"]:
        shown.add_row(
            f"checkpoint {record['checkpoint']}",
            f"step {record['step']}, {record['size_bytes'] / 1e6:.2f} MB, {record['tiers']}",
        )
    shown.add_row("training stood for a checkpoint", _span(report["blocked_s"]))
    shown.add_row("freeze", _span(report["freeze_s"]))
    for fault in report["faults"]:
        shown.add_row(
            f"killed: {fault['kind']}",
            f"noticed after {fault['detected_s']:.1f} s, healed after {fault['recovered_s']:.1f} s",
        )
    shown.add_row("resumed from", f"checkpoint {resumed['checkpoint']}, step {resumed['step']}")
    shown.add_row("steps repeated", str(report["steps_repeated"]))
    same = report["state_digest_at_checkpoint"] == report["state_digest_after_restore"] != ""
    shown.add_row("restored state equals saved state", "yes" if same else "NO")
    shown.add_row(
        "samples of mixed versions",
        f"{report['mixed_version_samples_trained']} trained on, {report['mixed_version_samples_refused']} refused",
    )
    return shown


def _buffer_version(view: View, checkpoints: Mapping[int, Checkpoint]) -> int:
    """Where the buffer's log stands; it says goodbye with the trainer, and then the last cut tells."""
    alive = view.alive(BUFFER)
    cut = max((record.buffer_version for record in checkpoints.values()), default=0)
    return max(cut, alive.buffer_version if alive is not None else 0)


def _checkpoint(record: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint": record.checkpoint,
        "step": record.training_step,
        "weight_version": record.weight_version,
        "buffer_version": record.buffer_version,
        "size_bytes": record.size_bytes,
        "tiers": "local and S3" if record.state == "durable" else "local",
    }


def _fault(fault: Fault) -> dict[str, Any]:
    seen = fault.measured
    return {
        "kind": seen.kind,
        "victim": seen.victim,
        "detected_s": round(seen.detected_at - seen.at, 2),
        "recovered_s": round(seen.recovered_at - seen.at, 2),
        "detail": seen.detail,
    }


def _resumed(history: list[Event], checkpoints: dict[int, Checkpoint]) -> dict[str, int]:
    restored = [e.fields["step"] for e in history if e.kind == "digest" and e.fields["when"] == "restore"]
    step = restored[-1] if restored else 0
    found = [number for number, record in checkpoints.items() if record.training_step == step]
    return {"checkpoint": min(found, default=0), "step": step}


def _digest(history: list[Event], step: int, when: str) -> str:
    found = [
        e for e in history if e.kind == "digest" and e.fields["when"] == when and e.fields["step"] == step
    ]
    if not found:
        return ""
    # The checkpoint that was restored is the one before the restore; the step may have been repeated after it.
    event = found[0] if when == "checkpoint" else found[-1]
    return str(event.fields["digest"])


def _spread(values: list[float]) -> dict[str, float]:
    return (
        {"median": round(median(values), 4), "max": round(max(values), 4)}
        if values
        else {"median": 0.0, "max": 0.0}
    )


def _span(spread: dict[str, float]) -> str:
    return f"median {spread['median'] * 1000:.0f} ms, longest {spread['max'] * 1000:.0f} ms"
