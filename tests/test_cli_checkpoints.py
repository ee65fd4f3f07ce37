"""`slackwater checkpoints show, diff, verify, pin` on the checkpoints of a real trainer, on both tiers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slackwater.adapters.cli_manifest import compare
from slackwater.adapters.explain import history
from slackwater.backends.embedded import EtcdCluster, S3Server
from slackwater.engine.manifest import Manifest, TensorEntry, VersionVector
from tests.test_bad_input import refused, slackwater
from tests.trainer_jobs import Job, running_job, wait_until


class Saved:
    """A job with two durable checkpoints of a trainer that has ended, and the commands on it."""

    def __init__(self, job: Job, s3: S3Server) -> None:
        self.job = job
        self._keys = {"AWS_ACCESS_KEY_ID": s3.access_key, "AWS_SECRET_ACCESS_KEY": s3.secret_key}

    def ask(self, *arguments: str) -> Any:
        """Run `slackwater checkpoints …` whatever its exit code."""
        return slackwater("checkpoints", *arguments, "--config", self.job.config, **self._keys)

    def json(self, *arguments: str) -> Any:
        """Run it with --json and parse what it prints."""
        return msgspec.json.decode(self.ask(*arguments, "--json").stdout)

    def files(self, number: int) -> list[Path]:
        """The tensor files of a checkpoint on this host."""
        directory = self.job.local / self.job.view().checkpoints()[number].path
        return sorted(directory.glob("*.safetensors"))


@pytest.fixture
def saved(tmp_path: Path, etcd: EtcdCluster, job: str, keyed_s3: S3Server) -> Iterator[Saved]:
    """Checkpoints of steps 4 and 8 on both tiers; the trainer has ended."""
    with running_job(tmp_path, job, etcd.endpoints, keyed_s3, checkpoint={"keep_last": -1}) as running:
        gang = running.start(steps=9)
        assert gang.wait(90) == [0, 0], gang.errors()
        wait_until(lambda: [r.state for r in running.view().checkpoints().values()] == ["durable"] * 2)
        yield Saved(running, keyed_s3)


@pytest.mark.real
def test_show_diff_verify_and_pin(saved: Saved) -> None:
    """The commands tell what is in the files, and a flipped bit on both tiers or on one is told apart."""
    first = saved.json("show", "1")
    assert (first["vector"]["training_step"], first["world_size"], first["state"]) == (4, 2, "durable")
    assert first["tensors"] == sum(first["dtypes"].values()) > 0
    assert "world size       2" in saved.ask("show", "1").stdout
    found = saved.json("diff", "1", "2")
    assert found["changed"]["training_step"] == [4, 8]
    assert (found["only_in_first"], found["only_in_second"], found["reshaped"]) == ([], [], {})
    assert "training_step 4 -> 8" in saved.ask("diff", "1", "2").stdout

    sound = saved.json("verify")
    assert (sound["checkpoint"], sound["readable"]) == (2, True)
    assert [tier["bad"] for tier in sound["tiers"].values()] == [{}, {}]
    damaged = saved.files(2)[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    one_copy = saved.json("verify", "2")
    assert one_copy["readable"]
    assert list(one_copy["tiers"]["local"]["bad"]) == [damaged.name]
    assert one_copy["tiers"]["remote"]["bad"] == {}
    said = saved.ask("verify", "2")
    assert said.returncode == 0
    assert "digest" in said.stdout

    assert saved.ask("pin", "1").returncode == 0
    assert saved.job.view().checkpoints()[1].pinned
    assert saved.ask("unpin", "1").returncode == 0
    assert not saved.job.view().checkpoints()[1].pinned
    refused(saved.ask("pin", "7"), "no checkpoint 7")
    commits = [entry for entry in history(saved.job.view()) if entry.kind == "commit"]
    assert all(0 < entry.fields["blocked_s"] < 30 for entry in commits)
    refused(saved.ask("show", "7"), "no checkpoint 7", "1, 2")


@pytest.mark.real
def test_verify_fails_when_nobody_has_a_good_copy(saved: Saved) -> None:
    """A file that is damaged here and gone from the bucket makes the checkpoint unreadable: said, with code 1."""
    lost = saved.files(1)[0]
    lost.unlink()
    text = saved.job.config.read_text()
    saved.job.config.write_text("\n".join(line for line in text.splitlines() if "s3_" not in line))
    done = saved.ask("verify", "1")
    assert done.returncode == 1
    assert f"no good copy of {lost.name}" in done.stderr
    shutil.rmtree(lost.parent)
    done = saved.ask("verify", "1")
    assert done.returncode == 1
    assert "no good manifest" in done.stderr


def test_the_files_need_a_site() -> None:
    """Without --config nobody knows where the files are: one line that says what to give."""
    refused(slackwater("checkpoints", "show", "1", "--job", "some"), "--config")


def test_a_comparison_names_what_changed() -> None:
    """Tensors that came, went or changed their shape or dtype are listed by name, settings by their dotted name."""

    def manifest(step: int, temperature: float, **tensors: tuple[str, tuple[int, ...]]) -> Manifest:
        return Manifest(
            job="j",
            job_uid="u",
            timeline=1,
            round=step,
            attempt="a",
            vector=VersionVector(training_step=step, weight_version=1, buffer_version=0),
            world_size=1,
            sampling={"temperature": temperature},
            tensors=tuple(
                TensorEntry(name=name, dtype=dtype, shape=shape, shards=())
                for name, (dtype, shape) in tensors.items()
            ),
        )

    old = manifest(1, 0.7, a=("float32", (2,)), b=("float32", (2,)), c=("float32", (2,)))
    new = manifest(2, 1.0, a=("float32", (2,)), b=("bfloat16", (2,)), d=("float32", ()))
    assert compare(old, new) == {
        "changed": {"training_step": (1, 2), "round": (1, 2)},
        "reshaped": {"b": ("float32[2]", "bfloat16[2]")},
        "only_in_first": ["c"],
        "only_in_second": ["d"],
        "sampling": ["temperature"],
        "identity": [],
    }
