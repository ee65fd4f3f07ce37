"""The processes of the demo's job, and the small supervisor that starts again what died.

Slackwater starts no process of a job; on a cluster this part is Kubernetes, Slurm or systemd.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

from slackwater.backends.child import ChildProcess, free_ports
from slackwater.backends.embedded import EtcdCluster, S3Server
from slackwater.engine.errors import ConfigError, Unavailable

from .task import make_demo_model

__all__ = ["ROOT", "Gang", "Stack"]

Rollout = Literal["sglang", "reference"]

ROOT = Path(__file__).resolve().parent.parent.parent
WORLD_SIZE = 2
COORDINATORS = 3
ROLLOUTS = 2
STOP_SECONDS = 4.0
RESTARTS = 12
SGLANG_OPTIONS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--host 127.0.0.1 --max-total-tokens 4096 --max-running-requests 32 --disable-cuda-graph "
    "--disable-overlap-schedule --mem-fraction-static 0.3 --skip-server-warmup --sleep-on-idle"
)


def sglang_python() -> Path:
    """The interpreter of SGLang's own environment; `ConfigError` says how to make it."""
    path = Path(os.environ.get("SLACKWATER_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python")))
    if not path.is_file():
        raise ConfigError(f"no SGLang at {path}: make sglang-env, or --rollout reference")
    return path


class Gang:
    """The ranks of one trainer. When one of them dies all are ended, and the next start is a new gang."""

    def __init__(self, argv: list[str], log: Path, environment: dict[str, str]) -> None:
        self._argv, self._log, self._environment = argv, log, environment
        self.ranks: list[ChildProcess] = []
        self.starts = 0

    def start(self) -> None:
        """Start every rank, with a rendezvous of its own."""
        self.starts += 1
        rendezvous = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
            "WORLD_SIZE": str(WORLD_SIZE),
        }
        self.ranks = []
        for rank in range(WORLD_SIZE):
            environment = self._environment | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            child = ChildProcess(self._argv, self._log.with_name(f"trainer-{rank}.log"), environment)
            child.start()
            self.ranks.append(child)

    def whole(self) -> bool:
        """Whether every rank runs."""
        return bool(self.ranks) and all(rank.running() for rank in self.ranks)

    def over(self) -> bool:
        """Whether no rank runs any more."""
        return not any(rank.running() for rank in self.ranks)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank (and to nothing that they started)."""
        for rank in self.ranks:
            rank.signal(number)

    def kill(self) -> None:
        """End every rank with SIGKILL."""
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.kill()


class Stack:
    """Everything that runs, in one directory, on free ports. A context manager: at its end nothing is left."""

    def __init__(
        self, work: Path, *, rollout: Rollout, steps: int, step_seconds: float, seed: int, etcd_members: int
    ) -> None:
        self.work, self.rollout = work, rollout
        self._steps, self._step_seconds, self._seed = steps, step_seconds, seed
        self.etcd = EtcdCluster(work / "etcd", etcd_members)
        self.s3 = S3Server(work / "s3")
        self.children: dict[str, ChildProcess] = {}
        self.config = work / "job.toml"
        self.urls: dict[str, str] = {}
        self.gang: Gang
        self.finished = False
        self._restarts = 0

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def events(self) -> Path:
        """Where the trainer writes what it does."""
        return self.work / "events.jsonl"

    @property
    def logs(self) -> Path:
        """The directory of every process's output."""
        return self.work / "logs"

    # -- start -------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the model and start etcd and S3; blocks until both answer."""
        self.logs.mkdir(parents=True, exist_ok=True)
        make_demo_model(self.work / "model", self._seed)
        self.etcd.start()
        self.s3.start()
        self.config.write_text(self._config_text())

    def start_job(self) -> None:
        """Start coordinators, rollout servers, sidecars and the trainer; returns at once."""
        slackwater = [str(Path(sys.executable).parent / "slackwater")]
        config = ["--config", str(self.config)]
        for number in range(COORDINATORS):
            name = f"coordinator-{number}"
            self._add(name, [*slackwater, "coordinator", *config, "--name", name])
        for number in range(ROLLOUTS):
            self._add_server(f"rollout-{number}")
        work = ["--work", str(self.work), "--model", str(self.work / "model")]
        amount = ["--steps", str(self._steps), "--step-seconds", str(self._step_seconds)]
        argv = [sys.executable, "-m", "examples.demo.rank", *config, *work, *amount]
        self.gang = Gang(argv, self.logs / "trainer.log", self._environment())
        self.gang.start()

    def start_sidecars(self) -> None:
        """Attach the rollout servers; the job must be there."""
        slackwater = str(Path(sys.executable).parent / "slackwater")
        for name, url in self.urls.items():
            attach = ["attach", "sglang", "--url", url, "--name", name, "--config", str(self.config)]
            self._add(f"sidecar-{name}", [slackwater, *attach])

    def _add(self, name: str, argv: list[str], environment: dict[str, str] | None = None) -> None:
        child = ChildProcess(argv, self.logs / f"{name}.log", environment or self._environment())
        child.start()
        self.children[name] = child

    def _add_server(self, name: str) -> None:
        port = free_ports(1)[0]
        self.urls[name] = f"http://127.0.0.1:{port}"
        place = ["--model-path", str(self.work / "model"), "--port", str(port)]
        if self.rollout == "reference":
            self._add(name, [sys.executable, "-m", "examples.reference_server", *place])
            return
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(ROOT / "examples" / "sglang_cpu"),
        }
        argv = [str(sglang_python()), "-m", "sglang.launch_server", *place, *SGLANG_OPTIONS.split()]
        self._add(name, argv, self._environment() | quiet)

    def _environment(self) -> dict[str, str]:
        names = {"AWS_ACCESS_KEY_ID": self.s3.access_key, "AWS_SECRET_ACCESS_KEY": self.s3.secret_key}
        paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return dict(os.environ) | names | paths

    def _config_text(self) -> str:
        site = {
            "etcd": list(self.etcd.endpoints),
            "local": str(self.work / "local"),
            "s3_bucket": self.s3.bucket,
            "s3_endpoint": self.s3.url,
            "s3_region": self.s3.region,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in site.items()]
        text = (Path(__file__).parent / "job.toml").read_text()
        return f"seed = {self._seed}\n{text}\n[site]\n" + "\n".join(lines) + "\n"

    # -- keep running ------------------------------------------------------------------------------------------

    def revive(self) -> list[str]:
        """Start again what died; the names. `Unavailable` with the end of its log for one that dies again and again."""
        revived = []
        for name, child in self.children.items():
            if not child.running():
                self._count(child)
                self._end_group(child)
                child.start()
                revived.append(name)
        if not self.finished and not self.gang.whole():
            self._count(next(rank for rank in self.gang.ranks if not rank.running()))
            self.gang.kill()
            self.gang.start()
            revived.append("trainer")
        return revived

    def _count(self, child: ChildProcess) -> None:
        self._restarts += 1
        if self._restarts > RESTARTS:
            child.check()
            raise Unavailable(f"processes died {self._restarts} times")

    def kill(self, name: str) -> None:
        """End one process with SIGKILL, with what it started."""
        child = self.children[name]
        child.signal(signal.SIGKILL)
        self._end_group(child)

    @staticmethod
    def _end_group(child: ChildProcess) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End everything, the servers last; a second Ctrl-C does not cut it short. Idempotent."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ranks = self.gang.ranks if hasattr(self, "gang") else []
        mine = [*ranks, *self.children.values()]
        for child in mine:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in mine:
            child.stop(max(0.1, deadline - time.monotonic()))
            self._end_group(child)
        self.s3.stop()
        self.etcd.stop()
