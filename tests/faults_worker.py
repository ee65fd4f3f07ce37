"""One scripted participant as a process of its own: real registration, real beat process, real files, no tensor.

`python -m tests.faults_worker <spec as JSON>`. What it must not answer for now stands in its control file (phase names,
one a line), so that a test can hold the whole job in one phase. What it did is appended to its events file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from slackwater.adapters.beat import BeatProcess
from slackwater.adapters.joining import join_when_free
from slackwater.adapters.stores import connect_store
from slackwater.backends.local import LocalTier
from slackwater.engine.action import put
from slackwater.engine.boundary import Directive
from slackwater.engine.config import JobConfig, Site
from slackwater.engine.digest import digest_file, sha256_text
from slackwater.engine.errors import Fenced, LeaseLost, NoSpace, SlackwaterError, SlotOccupied, Unavailable
from slackwater.engine.follow import Follower
from slackwater.engine.keys import BUFFER, TRAINER, Keys
from slackwater.engine.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Header,
    Manifest,
    Part,
    VersionVector,
    attempt_path,
    decode_manifest,
    decode_part,
    encode_json,
    manifest_digest,
    merge_manifest,
)
from slackwater.engine.membership import Membership
from slackwater.engine.model import Ack, Alive, Checkpoint, Participant, Record, Round, Route, Vote
from slackwater.engine.ports import KV, Compare
from slackwater.engine.tensorfile import write_small_file
from slackwater.engine.trainerrole import TrainerRole
from slackwater.engine.view import View

BUFFER_PART = "part-buffer.json"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is. `blind` takes the local deadline away, so that the store's fences are all that is left."""

    config: JobConfig
    site: Site
    name: str
    directory: str
    step_seconds: float = 0.1
    blind: bool = False


class BlindBeat(BeatProcess):
    """A beat whose worker believes for ever that effects are allowed."""

    def alive(self) -> bool:
        return True

    @property
    def lost(self) -> str:
        return ""


def content(what: str, timeline: int, step: int) -> bytes:
    """The state of a participant at a step of a timeline, some tens of KiB."""
    return f"{what} t{timeline} s{step}\n".encode() * 2000


def write_data(tier: LocalTier, path: str, name: str, data: bytes) -> FileEntry:
    """One file of an attempt, durably, and its entry."""
    file = tier.create(path) / name
    write_small_file(file, data, replace=True, files=tier.files)
    _, digest = digest_file(file, "sha256")
    return FileEntry(path=name, size_bytes=len(data), digest=digest)


class Worker:
    """What all roles have: store, beat, registration, control and events."""

    role = ""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.config, self.name = spec, spec.config, spec.name
        self.keys = Keys(spec.config.job)
        self.directory = Path(spec.directory)
        self.tier = LocalTier(Path(spec.site.local))
        lease_s = spec.config.timers.lease_s
        self.store = connect_store(spec.site, call_timeout_seconds=lease_s / 4)
        self.beat = (BlindBeat if spec.blind else BeatProcess)(spec.site, spec.config, spec.name)
        record = Participant(
            name=spec.name,
            role=self.role,  # type: ignore[arg-type]
            incarnation="",
            timeline=0,
            host=f"host-{spec.name}",
            pid=os.getpid(),
        )
        self.membership = Membership(self.store, self.keys, record, self.beat)
        self.cache: dict[str, tuple[int, Record]] = {}
        self.seen: tuple[dict[str, KV], int] = ({}, 0)
        self.news = threading.Event()
        self.stopping = threading.Event()
        self.told: dict[str, Any] = {}
        self.serial = 0

    def tell(self, event: str, **fields: Any) -> None:
        """Append to our events; the same twice in a row is told once."""
        said = {"event": event, **fields}
        if said == self.told:
            return
        self.told = said
        line = json.dumps({"at": time.monotonic(), "incarnation": self.membership.incarnation, **said})
        with (self.directory / f"{self.name}.events").open("a") as file:
            file.write(line + "\n")

    def tell_refusal(self, error: SlackwaterError) -> None:
        """Something that we wanted to write was not written, or nobody knows."""
        self.tell("refused", error=type(error).__name__, text=str(error)[:200])

    def held(self, phase: str) -> bool:
        """Whether this phase must not be answered now."""
        with contextlib.suppress(FileNotFoundError):
            return phase in (self.directory / f"{self.name}.hold").read_text().split()
        return False

    def release(self, phase: str) -> None:
        """Take a phase out of our own control file: it was done once, as asked."""
        path = self.directory / f"{self.name}.hold"
        path.write_text("\n".join(word for word in path.read_text().split() if word != phase))

    def join(self) -> None:
        """Register; a slot that is taken or a store that is away is waited for."""
        start = Alive(incarnation="")
        while not self.stopping.is_set():
            try:
                join_when_free(
                    self.store,
                    self.membership,
                    self.config.timers.lease_s,
                    lambda: start,
                    lambda: 1 << 30,  # the buffer's log reaches every step
                )
            except (SlotOccupied, Unavailable, NoSpace, LeaseLost) as error:
                self.tell("not joined", error=str(error))
                self.stopping.wait(0.2)
                continue
            self.tell("joined", timeline=self.membership.timeline)
            return

    def follow(self) -> None:
        """A thread that follows etcd, so that an etcd that is away keeps nobody from working."""
        follower = Follower(self.store, self.keys.root)
        while not self.stopping.is_set():
            try:
                if follower.poll(0.2):
                    self.seen = (dict(follower.kvs), follower.revision)
                    self.news.set()
            except Unavailable:
                self.stopping.wait(0.05)
        follower.close()

    def view(self) -> View:
        """What was seen last."""
        return View(self.keys, *self.seen, self.cache)

    def run(self) -> None:
        """Answer until told to stop. A life that is over is followed by another one."""
        self.join()
        follower = threading.Thread(target=self.follow, daemon=True)
        follower.start()
        while not self.stopping.is_set():
            self.news.wait(0.02 if self.role == "trainer" else 0.1)
            self.news.clear()
            view = self.view()
            if view.revision == 0:
                continue
            try:
                if self.beat.lost or self.membership.standing(view) == "replaced":
                    self.tell("over", lost=self.beat.lost)
                    self.next_life()
                    continue
                self.act(view)
            except (Fenced, LeaseLost, Unavailable, NoSpace) as error:
                self.tell_refusal(error)
                self.stopping.wait(0.05)
        follower.join()
        with contextlib.suppress(SlackwaterError):
            self.membership.end("left", "asked to stop")
        self.beat.close()
        self.store.close()

    def next_life(self) -> None:
        """Register as a new incarnation. Who is blind stays the zombie that it is."""
        if self.spec.blind:
            self.stopping.wait(0.05)
            self.zombie()
            return
        self.join()

    def zombie(self) -> None:
        """What a life that is over, and does not know, still tries: everything that it did when it was alive."""

    def act(self, view: View) -> None:
        raise NotImplementedError

    def vote(self, view: View, state: str, **fields: Any) -> None:
        """Cast our vote in the open round."""
        round_, me = view.round, self.membership
        if round_ is None:
            return
        vote = Vote(
            name=me.name,
            incarnation=me.incarnation,
            timeline=me.timeline,
            round=round_.round,
            state=state,  # type: ignore[arg-type]
            step=round_.step,
            version=round_.version,
            host=me.record.host,
            **{"path": round_.path, **fields},
        )
        key = self.keys.vote(round_.round, me.name)
        token = Compare(self.keys.round, "create", "=", view.create(self.keys.round))
        done = me.write([put(key, vote)], [token])
        self.tell("vote", round=round_.round, state=state, done=done)

    def my_vote(self, view: View) -> Vote | None:
        """Our vote in the open round."""
        return view.votes(view.round.round).get(self.name) if view.round is not None else None


class TrainerWorker(Worker):
    """Trains by counting; publishes, cuts, saves real files, restores them by verifying every byte."""

    role = "trainer"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.trainer = TrainerRole(self.store, self.membership, self.config)
        self.job_uid = ""
        self.stepped_at = self.retried_at = 0.0
        self.waits_for = ""
        self.saves: dict[str, Header] = {}  # path of an attempt -> header
        self.files: dict[str, Part] = {}

    def act(self, view: View) -> None:
        role, recovery = self.trainer, view.recovery
        if view.config is not None:
            self.job_uid = view.config.job_uid
        if role.unsettled:
            self.tell("settled", done=role.settle())
        task = role.recovery_task(view)
        if task == "acknowledge" and not self.held("fence"):
            role.acknowledge(view)
        elif task == "restore" and recovery is not None and not self.held("restore"):
            self.restore(view.checkpoints().get(recovery.checkpoint), recovery.recovery, recovery.checkpoint)
        elif task == "publish" and not self.held("publish"):
            self.publish(view, None)
        elif task == "go":
            self.train(view)
        role.state = "training" if task == "go" else "idle"
        role.report(view, waits_for=self.waits_for if task == "go" else "")

    def restore(self, record: Checkpoint | None, recovery: int, checkpoint: int) -> None:
        if self.held("restore_failed"):
            self.release("restore_failed")
            self.trainer.restore_failed(recovery, checkpoint, "as the test asked", unverified=False)
            self.tell("restore failed", recovery=recovery)
            return
        step = 0
        if record is not None:
            step = record.training_step
            manifest = read_manifest(self.tier, record)
            for entry in manifest.files:
                self.tier.verify(record.path, entry)
        self.trainer.restored(recovery, checkpoint, step, {})
        self.tell("restored", recovery=recovery, checkpoint=checkpoint, step=step)

    def publish(self, view: View, cut: Directive | None) -> None:
        role, me = self.trainer, self.membership
        self.serial += 1
        attempt = f"{me.incarnation}{self.serial}"
        header = Header(
            job=self.config.job,
            job_uid=self.job_uid,
            timeline=me.timeline,
            round=cut.round if cut is not None else 0,
            attempt=attempt,
            vector=VersionVector(training_step=role.step, weight_version=0, buffer_version=0),
            world_size=1,
        )
        path = attempt_path(header) if cut is not None else ""
        if cut is not None:
            self.saves[path] = header
        self.tell("publishing", step=role.step, attempt=attempt, cut=cut is not None)
        record = role.publish(
            view,
            location="nowhere",
            digest=sha256_text(content("weights", me.timeline, role.step)),
            size_bytes=1,
            attempt=attempt,
            cut=cut,
            path=path,
        )
        self.tell("published", step=role.step, version=record.version if record is not None else 0)

    def train(self, view: View) -> None:
        role = self.trainer
        if view.revision < self.membership.written_revision:
            return  # a view without our own last write
        try:
            self.serve(view)
        except (LeaseLost, Unavailable, NoSpace) as error:  # a round that waits is no reason to stand
            self.tell_refusal(error)
        directive = role.directive(view)
        self.waits_for = directive.reason if directive.kind == "hold" else ""
        if directive.kind == "go":
            if time.monotonic() - self.stepped_at >= self.spec.step_seconds:
                role.step += 1
                self.stepped_at = time.monotonic()
                self.tell("step", step=role.step, timeline=self.membership.timeline)
        elif directive.kind == "publish":
            self.publish(view, None)
        elif directive.kind == "cut" and not self.held("cut"):
            self.publish(view, directive)
        elif directive.kind == "hold":
            self.tell("hold", reason=directive.reason, step=role.step)
            if time.monotonic() - self.retried_at > 1.0:  # who stands tries a refused publication again
                self.retried_at, role.refused_step = time.monotonic(), -1

    def serve(self, view: View) -> None:
        """Our votes in the open round."""
        round_ = view.round
        if round_ is None or round_.path not in self.saves:
            return
        path = round_.path
        task = self.trainer.round_task(view)
        if task == "none" or self.held({"ready": "ready", "save": "saved", "seal": "sealed"}[task]):
            return
        if task == "ready":
            self.vote(view, "ready", path=path)
            return
        if path not in self.files:
            data = content("trainer", round_.timeline, round_.step)
            self.files[path] = Part(rank=0, files=(write_data(self.tier, path, "trainer.bin", data),))
        if task == "save":
            self.vote(view, "saved", path=path, digest=sha256_text(encode_json(self.files[path])))
        else:
            self.seal(view, round_)

    def seal(self, view: View, round_: Round) -> None:
        path = round_.path
        buffer = decode_part(self.tier.read_json(f"{path}/{BUFFER_PART}"), "the buffer's list")
        vector = VersionVector(
            training_step=round_.step, weight_version=round_.version, buffer_version=round_.step
        )
        steps = {str(version): step for version, step in view.step_map().items()}
        header = msgspec.structs.replace(self.saves[path], vector=vector, step_map=steps)
        manifest = merge_manifest(header, [self.files[path], buffer])
        encoded = encode_json(manifest)
        self.tier.write_json(f"{path}/{MANIFEST_NAME}", encoded, replace=True)
        size = sum(entry.size_bytes for entry in manifest.files)
        digest = manifest_digest(encoded)
        self.vote(view, "sealed", path=path, digest=digest, size_bytes=size, files=len(manifest.files))

    def zombie(self) -> None:
        """Publish, vote and acknowledge as if nothing had happened, on the view and with the fences of our last day."""
        view = self.view()
        for attempt in (
            lambda: self.publish(view, None),
            lambda: self.vote(view, "saved"),
            lambda: self.membership.acknowledge(
                view, Ack(recovery=view.timeline, name="", incarnation="", phase="fence")
            ),
        ):
            try:
                attempt()
            except (Fenced, LeaseLost, Unavailable) as error:
                self.tell_refusal(error)


class BufferWorker(Worker):
    """Votes with a file of its own, and answers recoveries."""

    role = "buffer"

    def act(self, view: View) -> None:
        recovery = view.recovery
        if recovery is None:
            self.serve(view)
        else:
            self.recover(view)
        self.membership.report(Alive(incarnation="", state="idle"))

    def serve(self, view: View) -> None:
        round_, mine = view.round, self.my_vote(view)
        if round_ is None or round_.voters.get(self.name) != self.membership.incarnation:
            return
        if mine is None and round_.phase in ("ready", "save") and not self.held("ready"):
            self.vote(view, "ready", buffer_version=round_.step)
        elif mine is not None and mine.state == "ready" and round_.phase == "save" and not self.held("saved"):
            data = content("buffer", round_.timeline, round_.step)
            entry = write_data(self.tier, round_.path, "buffer.log", data)
            part = encode_json(Part(participant=BUFFER, files=(entry,)))
            self.tier.write_json(f"{round_.path}/{BUFFER_PART}", part, replace=True)
            self.vote(view, "saved", buffer_version=round_.step, digest=sha256_text(part))

    def recover(self, view: View) -> None:
        me, recovery = self.membership, view.recovery
        if recovery is None:
            return
        ack = view.acks(recovery.recovery).get(me.name)
        fresh = Ack(
            recovery=recovery.recovery, name="", incarnation="", phase="fence", checkpoint=recovery.checkpoint
        )
        if ack is None or me.timeline != recovery.recovery:
            if not self.held("fence"):
                me.acknowledge(view, fresh)
        elif recovery.phase == "restore" and ack.phase == "fence" and not self.held("restore"):
            me.acknowledge_phase(msgspec.structs.replace(fresh, phase="restore"))
        elif recovery.phase == "freshness" and ack.phase == "restore" and not self.held("freshness"):
            me.acknowledge_phase(msgspec.structs.replace(fresh, phase="freshness"))


class RolloutWorker(Worker):
    """Follows the head by its word alone, and votes."""

    role = "rollout"

    def act(self, view: View) -> None:
        me, recovery, head = self.membership, view.recovery, view.head
        if recovery is None and me.standing(view) == "fenced":
            self.tell("over", lost="a timeline began and ended without us")
            self.next_life()
            return
        if recovery is not None and me.timeline != recovery.recovery:
            if not self.held("fence"):
                me.acknowledge(view, Ack(recovery=recovery.recovery, name="", incarnation="", phase="fence"))
            return
        route = view.routes().get(self.name)
        stale = head is not None and (route is None or route.version != head.version)
        if head is not None and head.timeline == me.timeline and stale and not self.held("route"):
            self.route(view, head.version)
        elif not stale:
            self.serve(view)
        version = route.version if route is not None else 0
        self.membership.report(Alive(incarnation="", state="rollout_in_progress", weight_version=version))

    def route(self, view: View, version: int) -> None:
        me = self.membership
        record = Route(
            name=me.name,
            url="http://127.0.0.1:1",
            version=version,
            timeline=me.timeline,
            incarnation=me.incarnation,
        )
        op = put(self.keys.route(me.name), record, self.beat.lease)
        done = me.write([op], [view.same(self.keys.weight_head)])
        self.tell("route", version=version, done=done)

    def serve(self, view: View) -> None:
        round_ = view.round
        if round_ is None or round_.voters.get(self.name) != self.membership.incarnation:
            return
        if round_.phase == "ready" and self.my_vote(view) is None and not self.held("ready"):
            self.vote(view, "saved")

    def zombie(self) -> None:
        """Write the route of our last day again."""
        view = self.view()
        try:
            self.route(view, view.head.version if view.head is not None else 1)
        except (Fenced, LeaseLost, Unavailable) as error:
            self.tell_refusal(error)


def read_manifest(tier: LocalTier, record: Checkpoint) -> Manifest:
    """The manifest that a record names, with its digest compared."""
    raw = tier.read_json(f"{record.path}/{MANIFEST_NAME}")
    if manifest_digest(raw) != record.manifest_digest:
        raise SlackwaterError(f"checkpoint {record.checkpoint}: the manifest is not the recorded one")
    return decode_manifest(raw)


def main() -> None:
    """Entry point."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    kinds: dict[str, type[Worker]] = {TRAINER: TrainerWorker, BUFFER: BufferWorker}
    worker = kinds.get(spec.name, RolloutWorker)(spec)
    signal.signal(signal.SIGTERM, lambda *_: worker.stopping.set())
    worker.run()


if __name__ == "__main__":
    main()
