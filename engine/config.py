"""A job's settings, their rules, and how they are read from TOML.

`JobConfig` is what all participants of a job must agree on; it lies in etcd under `config`. Where a process finds
etcd, S3 and its local directory is its own business (`Site`) and may differ from host to host.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import ConfigError
from .keys import check_name

__all__ = [
    "BufferSettings",
    "CheckpointSettings",
    "JobConfig",
    "Site",
    "Slots",
    "StallLimits",
    "Timers",
    "WeightSettings",
    "differing",
    "load_config",
]


class StallLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds without progress after which a participant counts as stalled, by state; 0 is never."""

    training: float = 600.0
    rollout_in_progress: float = 1800.0
    syncing: float = 120.0
    loading: float = 1800.0
    compiling: float = 1800.0
    saving: float = 600.0
    ready: float = 600.0
    idle: float = 0.0
    held: float = 0.0


class Timers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All waits of the protocol, in seconds."""

    heartbeat_s: float = 5.0
    """How often a lease is renewed."""
    lease_s: int = 15
    """Lease time: silence longer than this makes a participant `suspected`."""
    window_s: float = 60.0
    """Silence after the lease that makes it `failed`."""
    prepare_deadline_s: float = 1800.0
    """Wait for the trainer to reach the boundary that a round asks for."""
    ready_deadline_s: float = 30.0
    """From the cut until everyone is ready; at half of it laggards lose their route."""
    save_deadline_s: float = 600.0
    """From all ready until the manifest is sealed."""
    resync_deadline_s: float = 300.0
    """Wait for rollouts to load the restored weights; who misses it is left behind."""
    persist_s: float = 10.0
    """How often elapsed waiting time is written to etcd, so that a new leader goes on from there."""
    retry_wait_s: float = 5.0
    """First wait before a recovery is attempted again; doubles each time."""
    stall_s: StallLimits = StallLimits()
    """Progress limits by state."""


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and how checkpoints are taken."""

    every_steps: int = 100
    """A round at every multiple of this step; 0 is never."""
    every_seconds: float = 0.0
    """A round when the last one is older than this; 0 is never."""
    mode: Literal["overlap", "strict"] = "overlap"
    """`overlap`: training goes on while files are written. `strict`: everyone stands until the commit."""
    keep_last: int = 5
    """Checkpoints kept on each tier; -1 keeps all."""


class WeightSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publication of weights to the rollouts."""

    publish_every_steps: int = 3
    """A boundary every so many steps."""
    max_lag_steps: int = 5
    """The trainer stands when it is further ahead of the oldest routed version."""
    min_rollouts: int = 1
    """The trainer stands while fewer rollouts have a route; 0 is a pure trainer."""
    pause_mode: Literal["abort", "retract", "in_place"] = "retract"
    """What happens to requests in flight during an update."""
    keep_versions: int = 4
    """Published images kept at least, newest first; what is routed or pinned is kept anyway."""


class BufferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Freshness of samples."""

    max_staleness_steps: int = 0
    """Oldest policy, in training steps behind, that may be trained on; 0 takes `max_lag_steps`."""
    stale_fraction: float = 0.3
    """Above this share of stale samples the policy applies."""
    stale_policy: Literal["clear", "downweight", "keep"] = "clear"
    """What is done then."""


class Slots(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which single-slot participants the job has besides the trainer."""

    buffer: bool = True
    """Whether an experience buffer takes part; without one its version is 0 and it has no vote."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What everyone in a job agrees on. Validated when made by `load_config` or `checked`."""

    job: str
    seed: int = 0
    identity: dict[str, str | int | float | bool] = {}
    """Whatever names the job's model and data; a process that brings other values is refused."""
    slots: Slots = Slots()
    timers: Timers = Timers()
    checkpoint: CheckpointSettings = CheckpointSettings()
    weights: WeightSettings = WeightSettings()
    buffer: BufferSettings = BufferSettings()
    sampling: dict[str, str | int | float | bool] = {}
    """Sampling parameters at birth; afterwards `sampling` in etcd rules."""

    def checked(self) -> JobConfig:
        """Return self, or raise `ConfigError` naming the first rule that is broken and the values that break it."""
        check_name(self.job, "job name")
        for broken, rule in _rules(self):
            if broken:
                raise ConfigError(f"impossible configuration: {rule}")
        return self

    @property
    def max_staleness_steps(self) -> int:
        """The staleness bound in force."""
        return self.buffer.max_staleness_steps or max(
            self.weights.max_lag_steps, self.weights.publish_every_steps
        )


class Site(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one process finds its surroundings. Secrets come from the environment or from files, never from here."""

    etcd: tuple[str, ...] = ("127.0.0.1:2379",)
    etcd_user: str = ""
    etcd_password_file: str = ""
    etcd_ca: str = ""
    etcd_cert: str = ""
    etcd_key: str = ""
    local: str = "slackwater-data"
    """Directory of the local tier."""
    images: str = ""
    """Directory that trainer and rollouts share for published weights; default `<local>/images`."""
    s3_bucket: str = ""
    s3_prefix: str = ""
    s3_endpoint: str = ""
    s3_region: str = "us-east-1"
    s3_ca: str = ""

    @property
    def images_dir(self) -> Path:
        """The directory of published weights."""
        return Path(self.images) if self.images else Path(self.local) / "images"

    def remote_address(self, path: str) -> str:
        """The `s3://` address, for people and records, of a path on the remote tier."""
        prefix = self.s3_prefix.strip("/")
        return f"s3://{self.s3_bucket}/{prefix}/{path}" if prefix else f"s3://{self.s3_bucket}/{path}"


def _rules(config: JobConfig) -> list[tuple[bool, str]]:
    t, c, w, b = config.timers, config.checkpoint, config.weights, config.buffer
    positive = {
        "timers.heartbeat_s": t.heartbeat_s,
        "timers.lease_s": t.lease_s,
        "timers.window_s": t.window_s,
        "timers.prepare_deadline_s": t.prepare_deadline_s,
        "timers.ready_deadline_s": t.ready_deadline_s,
        "timers.save_deadline_s": t.save_deadline_s,
        "timers.resync_deadline_s": t.resync_deadline_s,
        "timers.persist_s": t.persist_s,
        "timers.retry_wait_s": t.retry_wait_s,
        "weights.publish_every_steps": w.publish_every_steps,
        "weights.keep_versions": w.keep_versions,
    }
    rules = [(not value > 0, f"{name} = {value} must be above 0") for name, value in positive.items()]
    not_negative = {
        "checkpoint.every_steps": c.every_steps,
        "checkpoint.every_seconds": c.every_seconds,
        "weights.min_rollouts": w.min_rollouts,
        "buffer.max_staleness_steps": b.max_staleness_steps,
        **{f"timers.stall_s.{name}": getattr(t.stall_s, name) for name in StallLimits.__struct_fields__},
    }
    rules += [(value < 0, f"{name} = {value} must not be negative") for name, value in not_negative.items()]
    rules += [
        (
            t.lease_s < 3 * t.heartbeat_s,
            f"timers.lease_s = {t.lease_s} must be at least 3 x timers.heartbeat_s = {t.heartbeat_s:g}: "
            "two lost beats in a row are no failure",
        ),
        (
            t.persist_s > t.window_s,
            f"timers.persist_s = {t.persist_s:g} must not be above timers.window_s = {t.window_s:g}: "
            "changes of leader could put a verdict off for ever",
        ),
        (
            0 < t.stall_s.training < t.lease_s,
            f"timers.stall_s.training = {t.stall_s.training:g} must not be below timers.lease_s = {t.lease_s}",
        ),
        (
            w.max_lag_steps < w.publish_every_steps,
            f"weights.max_lag_steps = {w.max_lag_steps} must be at least weights.publish_every_steps = "
            f"{w.publish_every_steps}: the trainer would wait for weights that it never publishes",
        ),
        (
            0 < b.max_staleness_steps < w.publish_every_steps,
            f"buffer.max_staleness_steps = {b.max_staleness_steps} must be at least weights.publish_every_steps = "
            f"{w.publish_every_steps}: every sample would be stale before it is trained",
        ),
        (not 0 < b.stale_fraction <= 1, f"buffer.stale_fraction = {b.stale_fraction} must be in (0, 1]"),
        (
            c.keep_last == 0 or c.keep_last < -1,
            f"checkpoint.keep_last = {c.keep_last} must be -1 (keep all) or at least 1",
        ),
    ]
    return rules


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> tuple[JobConfig, Site]:
    """Read a TOML file: the table `[site]` is this process's own, the rest is the job's.

    `overrides` (for instance from the command line) replace top-level values; `site` ones are merged.
    Raises `ConfigError` with the file, the setting and what is wrong with it.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    table = data.pop("site", {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: site must be a table: [site]")
    site = dict(table)
    for name, value in (overrides or {}).items():
        if name == "site":
            site.update(value)
        else:
            data[name] = value
    try:
        return msgspec.convert(data, JobConfig).checked(), msgspec.convert(site, Site)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the settings in which two nested mappings differ, in order."""
    names: list[str] = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names += differing(a, b, f"{prefix}{name}.")
        elif a != b:
            names.append(f"{prefix}{name}")
    return names
