"""The layout of a job's keys in the coordination store; numbers are zero-padded so that they sort."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["BUFFER", "TRAINER", "Keys", "check_name"]

TRAINER = "trainer"
BUFFER = "buffer"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def check_name(name: str, what: str) -> str:
    """Return a job's or participant's name unchanged, or raise `ConfigError` saying what is allowed."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} {name!r} is not valid: 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class Keys:
    """Every key below `/slackwater/<job>/`; nothing else in the project spells one out."""

    job: str

    def __post_init__(self) -> None:
        check_name(self.job, "job name")

    @property
    def root(self) -> str:
        """The prefix of the whole job, with its slash."""
        return f"/slackwater/{self.job}/"

    @property
    def config(self) -> str:
        """Identity and settings of the job."""
        return self.root + "config"

    @property
    def timeline(self) -> str:
        """The current timeline."""
        return self.root + "timeline"

    @property
    def timelines(self) -> str:
        """Prefix of the timelines' records."""
        return self.root + "timelines/"

    def timeline_record(self, timeline: int) -> str:
        """Parent and origin of one timeline."""
        return f"{self.timelines}{timeline:08d}"

    @property
    def leaders(self) -> str:
        """Prefix of the candidates' keys; the lowest create-revision leads."""
        return self.root + "leader/"

    @property
    def participants(self) -> str:
        """Prefix of the registrations."""
        return self.root + "participants/"

    def participant(self, name: str) -> str:
        """One registration."""
        return self.participants + name

    @property
    def alives(self) -> str:
        """Prefix of the liveness keys (under leases)."""
        return self.root + "alive/"

    def alive(self, name: str) -> str:
        """One participant's liveness key."""
        return self.alives + name

    @property
    def healths(self) -> str:
        """Prefix of the leader's verdicts."""
        return self.root + "health/"

    def health(self, name: str) -> str:
        """The leader's verdict on one participant."""
        return self.healths + name

    @property
    def go(self) -> str:
        """The trainer's grant."""
        return self.root + "go"

    @property
    def holds(self) -> str:
        """Prefix of the reasons to hold the trainer."""
        return self.root + "hold/"

    def hold(self, reason: str) -> str:
        """One reason to hold the trainer."""
        return self.holds + reason

    @property
    def weights(self) -> str:
        """Prefix of everything about published weights."""
        return self.root + "weights/"

    @property
    def weight_head(self) -> str:
        """The newest accepted weight version."""
        return self.weights + "head"

    @property
    def weight_versions(self) -> str:
        """Prefix of the weight versions' records: the step map."""
        return self.weights + "version/"

    def weight_version(self, version: int) -> str:
        """One weight version's record."""
        return f"{self.weight_versions}{version:010d}"

    @property
    def serving(self) -> str:
        """The version that the fleet serves."""
        return self.weights + "serving"

    @property
    def freeze(self) -> str:
        """Set while publication is refused."""
        return self.root + "freeze"

    @property
    def rounds(self) -> str:
        """Prefix of the open round and its votes."""
        return self.root + "rounds/"

    @property
    def round(self) -> str:
        """The open round; its create-revision is the round's token."""
        return self.rounds + "current"

    @property
    def round_head(self) -> str:
        """The last round's number (kept outside `rounds/`, which a fence deletes)."""
        return self.root + "round_head"

    def votes(self, number: int) -> str:
        """Prefix of one round's votes."""
        return f"{self.rounds}votes/{number:08d}/"

    def vote(self, number: int, name: str) -> str:
        """One vote."""
        return self.votes(number) + name

    @property
    def checkpoint_head(self) -> str:
        """The last checkpoint's id."""
        return self.root + "checkpoint_head"

    @property
    def checkpoints(self) -> str:
        """Prefix of the checkpoint records."""
        return self.root + "checkpoints/"

    def checkpoint(self, number: int) -> str:
        """One checkpoint record."""
        return f"{self.checkpoints}{number:08d}"

    @property
    def uploads(self) -> str:
        """Prefix of the uploads' progress."""
        return self.root + "uploads/"

    def upload(self, number: int, incarnation: str) -> str:
        """Progress of one upload by one incarnation."""
        return f"{self.uploads}{number:08d}/{incarnation}"

    @property
    def recovery(self) -> str:
        """The open recovery."""
        return self.root + "recovery/current"

    def acks(self, timeline: int) -> str:
        """Prefix of one recovery's acknowledgements."""
        return f"{self.root}recovery/acks/{timeline:08d}/"

    @property
    def all_acks(self) -> str:
        """Prefix of all acknowledgements."""
        return self.root + "recovery/acks/"

    def ack(self, timeline: int, name: str) -> str:
        """One participant's acknowledgement."""
        return self.acks(timeline) + name

    @property
    def sampling(self) -> str:
        """The sampling parameters in force."""
        return self.root + "sampling"

    @property
    def routes(self) -> str:
        """Prefix of the routes (under the rollouts' leases)."""
        return self.root + "routes/"

    def route(self, name: str) -> str:
        """One rollout's route."""
        return self.routes + name

    @property
    def pins(self) -> str:
        """Prefix of what readers use."""
        return self.root + "pins/"

    def pin(self, name: str) -> str:
        """What one reader uses."""
        return self.pins + name

    @property
    def requests(self) -> str:
        """Prefix of the operators' wishes."""
        return self.root + "requests/"

    def request(self, uuid: str) -> str:
        """One operator's wish and its fate."""
        return self.requests + uuid

    @property
    def logs(self) -> str:
        """Prefix of the bounded history."""
        return self.root + "log/"

    def log(self, number: int) -> str:
        """One entry of the history."""
        return f"{self.logs}{number:012d}"
