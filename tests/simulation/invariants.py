"""What must always hold, asserted after every event from the store's history, the disks and what processes did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from slackwater.engine.membership import Membership
from slackwater.engine.model import WeightVersion
from slackwater.engine.ports import Put, Txn
from slackwater.engine.trainerrole import TrainerRole
from slackwater.engine.view import View

from .kernel import Process
from .parts import Model

if TYPE_CHECKING:
    from .world import World

__all__ = ["Invariants"]

_json = msgspec.json.decode


class Invariants:
    """Watches a world; each broken promise becomes one of the kernel's problems.

    It keeps a plain copy of the job's keys (decoded JSON) of its own and shares no code with what it checks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = self.commits = self.recoveries = 0
        self.now: dict[str, Any] = {}
        self._revision = world.store.revision
        self._root = len(world.keys.root)
        self._versions: dict[int, Any] = {}
        self._last_checkpoint = 0
        self._ever_checkpoints = 0
        self._grants: set[tuple[str, int]] = set()
        self._landed: dict[str, float] = {}  # attempt -> when its publication took effect
        self._refused: set[str] = set()
        self._short_since = -1.0
        self._frozen_since = -1.0
        self.forged = False  # somebody outside the protocol writes

    def fail(self, rule: str, text: str) -> None:
        self.world.kernel.fail(f"{rule}: {text}")

    # -- the store's history -------------------------------------------------------------------------------

    def store_changed(self) -> None:
        """Take in what was written since the last event, one revision at a time."""
        history = self.world.store.history
        index = len(history)
        while index and history[index - 1].event.kv.mod_revision > self._revision:
            index -= 1
        while index < len(history):
            revision = history[index].event.kv.mod_revision
            before, changes = dict(self.now), {}
            while index < len(history) and history[index].event.kv.mod_revision == revision:
                event = history[index].event
                key = event.kv.key[self._root :]
                if event.kind == "put":
                    changes[key] = self.now[key] = _json(event.kv.value)
                else:
                    changes[key] = None
                    self.now.pop(key, None)
                index += 1
            self._revision = revision
            self._judge(before, changes)

    def _judge(self, before: dict[str, Any], changes: dict[str, Any]) -> None:
        self._told(before, changes)
        for key, value in changes.items():
            if value is None:
                if key.startswith("weights/version/"):
                    self._forgotten(before[key])
                continue
            if key.startswith("checkpoints/"):
                self._checkpoint(before, key, value)
            elif key.startswith("weights/version/"):
                self._version(before, key, value)
            elif key.startswith("routes/"):
                self._route(key, value)
            elif key == "recovery/current":
                self._recovery(before, value)
            elif key.startswith("timelines/"):
                self._selected(before, value)
            elif key == "go":
                self._go(before, value)
            elif key == "freeze":
                self._freeze(before, value)
            elif key == "timeline":
                self._timeline(before, value)
            elif key == "rounds/current":
                self._round(before, value)
            elif key.startswith("health/"):
                self._health(key, value)
            elif key.startswith("alive/"):
                self._alive(before, key, value)
        self._shortage()
        if "freeze" not in self.now:
            self._frozen_since = -1.0
        elif self._frozen_since < 0:
            self._frozen_since = self.world.kernel.now

    def _told(self, before: dict[str, Any], changes: dict[str, Any]) -> None:
        """What decides about the past has its line of history in the very same transaction."""
        lines = {record["kind"] for key, record in changes.items() if key.startswith("log/") and record}
        created = [key for key in changes if key.startswith("checkpoints/") and key not in before]
        if created and "commit" not in lines:
            self.fail("history", f"{created[0]} without its line")
        if before.get("timeline") and changes.get("timeline") and "recovery" not in lines:
            self.fail("history", f"timeline {changes['timeline']['timeline']} without its line")

    @property
    def timeline(self) -> int:
        found = self.now.get("timeline")
        return found["timeline"] if found else 0

    def lineage(self) -> dict[int, tuple[int, int]]:
        """Timeline -> highest checkpoint and version that count, computed anew."""
        found: dict[int, tuple[int, int]] = {}
        at, top = self.timeline, (1 << 60, 1 << 60)
        while at:
            found[at] = top
            record = self.now[f"timelines/{at:08d}"]
            if record["selected"]:
                top = (min(top[0], record["from_checkpoint"]), min(top[1], record["from_version"]))
            at = record["parent"]
        return found

    def _checkpoint(self, before: dict[str, Any], key: str, record: dict[str, Any]) -> None:
        number = int(key.rsplit("/", 1)[1])
        old = before.get(key)
        if old is not None:
            if old["state"] == "deleting" and record["state"] != "deleting":
                self.fail("I12", f"checkpoint {number} is no longer deleting")
            if record["state"] == "deleting" and old["state"] != "deleting":
                self._marked(before, number, record)
            return
        if number != self._last_checkpoint + 1:
            self.fail("I2", f"checkpoint {number} after {self._last_checkpoint}")
        self._last_checkpoint = number
        self.commits += 1
        self._committed(before, number, record)

    def _committed(self, before: dict[str, Any], number: int, record: dict[str, Any]) -> None:
        round_ = before.get("rounds/current")
        if round_ is None:
            self.fail("I1", f"checkpoint {number} without a round")
            return
        if record["timeline"] != self.timeline or round_["timeline"] != self.timeline:
            self.fail("I5", f"checkpoint {number} of timeline {record['timeline']} on {self.timeline}")
        cut = (record["training_step"], record["weight_version"])
        version = self.now.get(f"weights/version/{cut[1]:010d}")
        if version is None or version["step"] != cut[0]:
            self.fail("I1", f"checkpoint {number}: version {cut[1]} is not of step {cut[0]}")
            return
        voters = {**round_["voters"]}
        if "trainer" not in voters or "buffer" not in voters:
            self.fail("I1", f"checkpoint {number}: voters {sorted(voters)}")
        for name, incarnation in voters.items():
            vote = before.get(f"rounds/votes/{round_['round']:08d}/{name}")
            good = (
                vote is not None
                and vote["state"] in ("saved", "sealed")
                and vote["incarnation"] == incarnation
                and (vote["step"], vote["version"]) == cut
                and vote["timeline"] == record["timeline"]
            )
            if not good:
                self.fail("I1", f"checkpoint {number}: no counting vote of {name}: {vote}")
        files, path = self.world.files, record["path"]
        model, part = files.get(f"{path}/trainer"), files.get(f"{path}/buffer")
        if not isinstance(model, Model) or part is None or f"{path}/manifest" not in files:
            self.fail("I1", f"checkpoint {number}: files of {path} are missing")
            return
        if model.step != cut[0] or model.digest != version["digest"]:
            self.fail("I1", f"checkpoint {number}: the files are step {model.step}, not {cut[0]}")
        trained = {s for ids in self.world.parts[path].values() for s in ids}
        if trained != model.trained:
            self.fail("I13", f"checkpoint {number}: trainer and buffer differ by {trained ^ model.trained}")

    def _marked(self, before: dict[str, Any], number: int, record: dict[str, Any]) -> None:
        lineage = self.lineage()
        live = {
            int(key.rsplit("/", 1)[1]): found
            for key, found in before.items()
            if key.startswith("checkpoints/") and found["state"] != "deleting"
        }
        chosen = [n for n, c in live.items() if c["timeline"] in lineage and n <= lineage[c["timeline"]][0]]
        if number == max(live) or number == max(chosen, default=-1):
            self.fail("I12", f"checkpoint {number}, the newest, is marked")
        durable = [n for n, c in live.items() if c["state"] == "durable"]
        if durable and number == max(durable):
            self.fail("I12", f"checkpoint {number}, the newest durable, is marked")
        if before.get("recovery/current") is not None:
            self.fail("I12", f"checkpoint {number} is marked during a recovery")
        if record["pinned"]:
            self.fail("I12", f"checkpoint {number} is marked though pinned")
        for key, upload in before.items():
            if (
                key.startswith("uploads/")
                and upload["checkpoint"] == number
                and upload["state"] == "uploading"
            ):
                self.fail("I12", f"checkpoint {number} is marked while it uploads")

    def _version(self, before: dict[str, Any], key: str, record: dict[str, Any]) -> None:
        number = int(key.rsplit("/", 1)[1])
        if number in self._versions:
            self.fail("I3", f"version {number} is written again")
        if number != len(self._versions) + 1:
            self.fail("I3", f"version {number} after {len(self._versions)}")
        self._versions[number] = record
        if record["timeline"] != self.timeline:
            self.fail("I5", f"version {number} of timeline {record['timeline']} on {self.timeline}")
        if self.world.images.get(record["attempt"]) != record["digest"]:
            self.fail("I3", f"version {number}: its bytes are others")
        if before.get("freeze") is not None:
            self.fail("I6", f"version {number} is published while frozen")
        head = self.now.get("weights/head")
        if head is None or head["version"] != number or head["step"] != record["step"]:
            self.fail("I3", f"version {number} is not the head")
        self._landed[record["attempt"]] = self.world.kernel.now
        if record["attempt"] in self._refused:
            self.fail("I3", f"version {number} takes effect after the trainer took it for refused")
        for other, found in self._versions.items():
            if other != number and found["attempt"] == record["attempt"]:
                self.fail("I3", f"versions {other} and {number} are one publication")

    def _forgotten(self, version: dict[str, Any]) -> None:
        """A version's record goes: nobody may look it up any more, not even for an old sample."""
        number = version["version"]
        named = {"routes/": "version", "checkpoints/": "weight_version", "pins/": "version"}
        holders = [
            (key, record[field])
            for key, record in self.now.items()
            for prefix, field in named.items()
            if key.startswith(prefix)
        ]
        holders += [(k, self.now[k]["version"]) for k in ("weights/head", "freeze") if k in self.now]
        if any(k.startswith("weights/version/") and r["version"] < number for k, r in self.now.items()):
            self.fail("I3", f"version {number} is forgotten before an older one")
        slack = self.world.config.max_staleness_steps
        for key, needed in holders:
            if needed and self._versions[needed]["step"] - slack <= version["step"]:
                self.fail("I12", f"version {number} is forgotten, {key} needs {needed} and samples near it")

    def _route(self, key: str, record: dict[str, Any]) -> None:
        name = key.split("/", 1)[1]
        engine = self.world.engines[name]
        version = self._versions.get(record["version"])
        registered = self.now.get(f"participants/{name}")
        if registered is None or registered["incarnation"] != record["incarnation"]:
            self.fail("I5", f"a route of {name} by another incarnation")
        if record["timeline"] != self.timeline:
            self.fail("I5", f"a route of {name} on timeline {record['timeline']}, now {self.timeline}")
        proof = engine.proofs.get(record["label"])
        wanted = f"{record['timeline']}.{record['version']}.{record['incarnation']}"
        if version is None or proof != version["digest"] or record["label"] != wanted:
            self.fail("I7", f"{name} has a route for {record['label']} that it has not proven")
        elif self.timeline != version["timeline"]:
            self.fail("I7", f"{name} has a route for version {record['version']} of an older timeline")

    def _recovery(self, before: dict[str, Any], record: dict[str, Any]) -> None:
        old = before.get("recovery/current")
        if record["phase"] == "restore" and record["attempts"] >= 3:
            self.fail("recovery", f"attempt {record['attempts'] + 1} on checkpoint {record['checkpoint']}")
        if old is not None and old["phase"] == "fence" and record["phase"] == "select":
            for name in ("trainer", "buffer"):
                ack = self.now.get(f"recovery/acks/{record['recovery']:08d}/{name}")
                registered = self.now.get(f"participants/{name}")
                if ack is None or registered is None or ack["incarnation"] != registered["incarnation"]:
                    self.fail("I5", f"recovery {record['recovery']} selects before {name} is fenced")
                elif registered["timeline"] != record["recovery"]:
                    self.fail("I5", f"recovery {record['recovery']}: {name} is on {registered['timeline']}")
            if self.world.buffer.timeline < record["recovery"]:
                self.fail("I5", f"recovery {record['recovery']}: the buffer does not know of it")

    def _selected(self, before: dict[str, Any], record: dict[str, Any]) -> None:
        if not record["selected"] or record["timeline"] != self.timeline or record["timeline"] == 1:
            return
        number, recovery = record["from_checkpoint"], before["recovery/current"]
        if number == 0:
            if self._last_checkpoint:
                self.fail("I9", "a start from nothing though there are checkpoints")
            return
        found = before.get(f"checkpoints/{number:08d}")
        parent = self._without(record["timeline"])
        if found is None or found["state"] == "deleting":
            self.fail("I9", f"checkpoint {number} is chosen and being deleted")
            return
        if found["timeline"] not in parent or number > parent[found["timeline"]][0]:
            self.fail("I9", f"checkpoint {number} is chosen and not on the lineage")
        if not recovery["target"]:
            newer = [
                int(key.rsplit("/", 1)[1])
                for key, c in before.items()
                if key.startswith("checkpoints/")
                and int(key.rsplit("/", 1)[1]) > number
                and c["state"] != "deleting"
                and c["timeline"] in parent
                and int(key.rsplit("/", 1)[1]) <= parent[c["timeline"]][0]
                and key.rsplit("/", 1)[1].lstrip("0") not in recovery["skipped"]
            ]
            if newer:
                self.fail("I9", f"checkpoint {number} is chosen, {newer} are newer")

    def _without(self, timeline: int) -> dict[int, tuple[int, int]]:
        """The lineage above a timeline that may have selected something before."""
        parent = self.now[f"timelines/{timeline:08d}"]["parent"]
        found: dict[int, tuple[int, int]] = {}
        at, top = parent, (1 << 60, 1 << 60)
        while at:
            found[at] = top
            record = self.now[f"timelines/{at:08d}"]
            if record["selected"]:
                top = (min(top[0], record["from_checkpoint"]), min(top[1], record["from_version"]))
            at = record["parent"]
        return found

    def _go(self, before: dict[str, Any], record: dict[str, Any]) -> None:
        self.recoveries += 1
        self._grants.add((record["incarnation"], record["timeline"]))
        if record["timeline"] != self.timeline:
            self.fail("I5", f"go for timeline {record['timeline']}, now {self.timeline}")
        trainer = self.now.get("participants/trainer")
        if trainer is None or trainer["incarnation"] != record["incarnation"]:
            self.fail("I8", "go for a trainer that is not registered")
        head = self.now.get("weights/head")
        if head is None or head["timeline"] != self.timeline:
            self.fail("I7", "go before the first full publication of the timeline")
        routes = sum(key.startswith("routes/") for key in self.now)
        if routes < self.world.config.weights.min_rollouts and before.get("hold/min_rollouts") is None:
            self.world.kernel.trace.append("go with too few routes")

    def _freeze(self, before: dict[str, Any], record: dict[str, Any]) -> None:
        if self.forged:
            return
        round_ = self.now.get("rounds/current")
        if round_ is None or round_["round"] != record["round"] or round_["timeline"] != self.timeline:
            self.fail("I6", f"a freeze for round {record['round']} that is not open")
        version = self.now.get(f"weights/version/{record['version']:010d}")
        if version is None or version["step"] != record["step"] or version["timeline"] != self.timeline:
            self.fail("I1", f"the cut is step {record['step']} and version {record['version']}")

    def _timeline(self, before: dict[str, Any], record: dict[str, Any]) -> None:
        old = before.get("timeline")
        if old is not None and record["timeline"] != old["timeline"] + 1:
            self.fail("I5", f"timeline {record['timeline']} after {old['timeline']}")
        for key in self.now:
            if key in ("freeze", "go") or key.startswith(("routes/", "rounds/")):
                self.fail("I5", f"{key} survives the fence of {record['timeline']}")

    def _round(self, before: dict[str, Any], record: dict[str, Any]) -> None:
        old = before.get("rounds/current")
        if old is not None and old["round"] == record["round"] and old["phase"] != "prepare":
            for name, incarnation in record["voters"].items():
                if old["voters"].get(name) != incarnation:
                    self.fail("I1", f"{name} becomes a voter of round {record['round']} after the cut")
            for name in old["voters"].keys() - record["voters"].keys():
                if f"routes/{name}" in self.now or not name.startswith("rollout"):
                    self.fail("I1", f"{name} keeps its route and loses its vote in round {record['round']}")
        if old is None or old["phase"] != "prepare" or record["phase"] != "ready":
            return
        for key in self.now:
            if key.startswith("routes/") and key.split("/", 1)[1] not in record["voters"]:
                self.fail("I1", f"{key} is no voter of round {record['round']}")

    def _health(self, key: str, record: dict[str, Any]) -> None:
        name = key.split("/", 1)[1]
        alive = self.now.get(f"alive/{name}")
        if (
            record["state"] == "failed"
            and record["evidence"].startswith("silent")
            and alive is not None
            and alive["incarnation"] == record["incarnation"]
        ):
            self.fail("verdict", f"{name} is failed for its silence, and is back")

    def _alive(self, before: dict[str, Any], key: str, record: dict[str, Any]) -> None:
        health = self.now.get(f"health/{key.split('/', 1)[1]}")
        if (
            key not in before
            and health is not None
            and health["state"] == "failed"
            and health["incarnation"] == record["incarnation"]
        ):
            self.fail("I5", f"{key} comes back after its incarnation was declared failed")

    def _shortage(self) -> None:
        """Since when the trainer may train with too few routes and nobody holds it."""
        wanted = self.world.config.weights.min_rollouts
        short = (
            "go" in self.now
            and "hold/min_rollouts" not in self.now
            and sum(key.startswith("routes/") for key in self.now) < wanted
        )
        if not short:
            self._short_since = -1.0
        elif self._short_since < 0:
            self._short_since = self.world.kernel.now

    def time_passed(self) -> None:
        """The freeze ends within a bounded time once store and coordinators are up, whatever befalls the others."""
        timers = self.world.config.timers
        bound = timers.ready_deadline_s + timers.save_deadline_s + timers.lease_s + timers.window_s + 2.0
        now, calm = self.world.kernel.now, self.world.led_since
        if self._frozen_since >= 0 and now - max(self._frozen_since, calm) > bound:
            self.fail("I6", f"frozen for {now - self._frozen_since:.1f} s")

    # -- what processes do ---------------------------------------------------------------------------------

    def sent(self, process: Process, txn: Txn) -> None:
        """A transaction leaves this process."""
        name = process.name.split("#")[0]
        found = self.world.coordinators.get(process.name)
        if found is None or not name.startswith("coordinator"):
            return
        if txn.ops[0].key.startswith(self.world.keys.leaders):
            return
        lease = self.world.store._leases.get(found._session.lease)
        if lease is None or lease.expires_at <= self.world.kernel.now:
            self.fail("I11", f"{process.name} sends {txn.ops[0].key} after its lease may have expired")

    def applied(self, process: Process, txn: Txn) -> None:
        """A transaction of this process is about to be applied successfully."""
        name = process.name.split("#")[0]
        keys = self.world.keys
        puts = [op.key for op in txn.ops]
        if name.startswith("coordinator") and not puts[0].startswith(keys.leaders):
            leader = self.world.leader()
            if leader != process.name:
                self.fail("I4", f"{process.name} writes {puts[0]} while {leader or 'nobody'} leads")
        elif not name.startswith("coordinator"):
            self._participant(name, txn)

    def _participant(self, name: str, txn: Txn) -> None:
        keys = self.world.keys
        registered = self.now.get(f"participants/{name}")
        timeline = self.timeline
        for op in txn.ops:
            if not isinstance(op, Put) or op.key.startswith((keys.participants, keys.alives, keys.pins)):
                continue
            value = _json(op.value)
            incarnation = value.get("incarnation")
            if op.key.startswith(keys.uploads) or incarnation is None:
                incarnation = registered and registered["incarnation"]
            if registered is None or registered["incarnation"] != incarnation or registered["ended"]:
                self.fail("I5", f"{name}: {op.key} by incarnation {incarnation}, which is not registered")
            if value.get("timeline", timeline) != timeline:
                self.fail("I5", f"{name}: {op.key} of timeline {value['timeline']}, now {timeline}")
            if f"alive/{name}" not in self.now:
                self.fail("I11", f"{name}: {op.key} without a lease")
            if op.key.startswith(keys.rounds + "votes/"):
                round_ = self.now.get("rounds/current")
                if round_ is None or round_["round"] != value["round"]:
                    self.fail("I5", f"{name}: a vote in round {value['round']}, which is closed")

    def effect(self, me: Membership | None, what: str) -> None:
        """A participant is about to change something outside etcd."""
        if me is None:
            return
        lease = self.world.store._leases.get(me.beat.lease)
        if lease is None or lease.expires_at <= self.world.kernel.now:
            self.fail("I11", f"{me.name}: {what} after its lease may have expired")

    def granted(self, me: Membership, view: View) -> None:
        """The trainer leaves its recovery."""
        self.store_changed()
        if (me.incarnation, me.timeline) not in self._grants:
            self.fail("I8", f"incarnation {me.incarnation} goes on without a go")

    def restored(self, me: Membership, number: int, model: Model) -> None:
        """The trainer holds a checkpoint's state."""

    def step_taken(
        self, role: TrainerRole, granted: tuple[View, bool] | None, model: Model, samples: tuple[int, ...]
    ) -> None:
        """The trainer is about to apply an optimizer update."""
        self.store_changed()
        self.steps += 1
        me = role.membership
        if (me.incarnation, me.timeline) not in self._grants:
            self.fail("I8", f"a step by {me.incarnation} on {me.timeline} without a go")
        again = model.trained & set(samples)
        if again:
            self.fail("I13", f"samples {sorted(again)} are trained again at step {model.step + 1}")
        if len(model.trained) != 2 * model.step:
            self.fail("I13", f"{len(model.trained)} samples were trained in {model.step} steps")
        if granted is None:
            return
        view, connected = granted
        if not connected:
            return
        timers = self.world.config.timers
        since = max(self._short_since, self.world.calm_since)
        if self._short_since >= 0 and self.world.kernel.now - since > timers.lease_s + 1.0:
            self.fail("hold", f"steps for {self.world.kernel.now - since:.1f} s with too few routes, no hold")
        limit = self.world.config.weights.max_lag_steps
        steps = [self._versions[route.version]["step"] for route in view.routes().values()]
        if steps and model.step - min(steps) > limit:
            self.fail("I10", f"a step at {model.step} while a rollout serves step {min(steps)}")
        if view.go is None:
            self.fail("I8", "a step without a go in its view")

    def published(self, record: WeightVersion, model: Model) -> None:
        """The trainer believes that this version is accepted."""
        self.store_changed()
        known = self._versions.get(record.version)
        if known is None or known["digest"] != model.digest or known["step"] != model.step:
            self.fail("I3", f"the trainer takes version {record.version} for what it is not")

    def refused(self, attempt: str) -> None:
        """The trainer takes this publication for refused: it must not have taken effect, and never will."""
        self.store_changed()
        if attempt in self._landed:
            self.fail("I3", "the trainer takes an accepted publication for refused")
        self._refused.add(attempt)

    def deleted(self, number: int) -> None:
        """Files of a checkpoint are removed."""
        self.store_changed()
        record = self.now.get(f"checkpoints/{number:08d}")
        if record is not None and record["state"] != "deleting":
            self.fail("I12", f"files of checkpoint {number} go while it is {record['state']}")

    # -- after quiet ---------------------------------------------------------------------------------------

    def quiet(self, steps_before: int) -> None:
        """All faults are over for long: the job must be running, nothing left behind."""
        recovery = self.now.get("recovery/current")
        if recovery is not None and recovery["phase"] == "needs_operator":
            return
        if self.steps == steps_before:
            holds = [key for key in self.now if key.startswith("hold/")]
            self.fail(
                "liveness",
                f"no step in the quiet: recovery {recovery}, holds {holds}, go {self.now.get('go')}",
            )
        for name, engine in self.world.engines.items():
            route = self.now.get(f"routes/{name}")
            if route is not None:
                version = self._versions[route["version"]]
                if engine.label != route["label"] and not engine.label.startswith(f"{self.timeline}."):
                    self.fail("I7", f"{name} serves {engine.label!r}, its route says {route['label']!r}")
                del version
