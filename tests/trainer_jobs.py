"""A job around a training script under test: a coordinator in a thread, and gangs of ranks as processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slackwater.backends.child import free_ports
from slackwater.backends.embedded_s3 import S3Server
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.config import JobConfig, load_config
from slackwater.engine.coordinator import Coordinator
from slackwater.engine.follow import Follower
from slackwater.engine.keys import Keys
from slackwater.engine.model import Request, encode
from slackwater.engine.ports import Compare, Put, Txn
from slackwater.engine.session import Session, SessionKeeper
from slackwater.engine.view import View

from .trainer_scripts.train import run_rank

Event = dict[str, Any]


def wait_until(condition: Callable[[], Any], timeout_seconds: float = 30.0) -> Any:
    """What a condition says, once it says something."""
    deadline, pause = time.monotonic() + timeout_seconds, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < deadline, "not in time"
        pause.wait(0.02)
    return found


_GANGS = itertools.count()
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["pytest", "tests.trainer_scripts.train"])


class Gang:
    """The ranks of one trainer, started together. End it with `kill` (it does nothing to ranks that ended).

    Ranks are processes, forked from a server that has imported torch once for all of them.
    """

    def __init__(self, config: Path, out: Path, world: int, options: Mapping[str, Any]) -> None:
        self.out, self.world = out, world
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        env |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self.processes = []
        for rank in range(world):
            said = out.with_suffix(f".{rank}.err")
            rank_process = _FORKS.Process(
                target=run_rank, args=(env, said, rank, world, config, out, dict(options)), daemon=False
            )
            rank_process.start()
            self.processes.append(rank_process)

    def wait(self, timeout_seconds: float = 60.0) -> list[int]:
        """Exit codes of all ranks; negative: the signal that ended one."""
        deadline = time.monotonic() + timeout_seconds
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"the gang did not end in time:\n{self.errors()}"
        return [code for code in codes if code is not None]

    def kill(self) -> None:
        """SIGKILL every rank that still runs."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def events(self, kind: str = "", rank: int = 0) -> list[Event]:
        """What a rank has reported so far."""
        path = self.out.with_suffix(f".{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if kind in ("", event["event"])]

    def errors(self) -> str:
        """What all ranks wrote to stderr (and stdout)."""
        paths = [self.out.with_suffix(f".{rank}.err") for rank in range(self.world)]
        return "\n".join(f"-- {p.name}\n{p.read_text()[-6000:]}" for p in paths if p.exists())

    def until(self, condition: Callable[[], Any], timeout_seconds: float = 60.0) -> Any:
        """Wait for a condition, failing at once when a rank ends with an error."""
        deadline = time.monotonic() + timeout_seconds
        pause = threading.Event()
        while not (found := condition()):
            late = time.monotonic() > deadline
            if late or any(p.exitcode not in (None, 0) for p in self.processes):
                raise AssertionError(f"{'not in time' if late else 'a rank ended'}:\n{self.errors()}")
            pause.wait(0.02)
        return found


class Job:
    """One job: its configuration file, its coordinator, its view. Close it at the end."""

    def __init__(
        self,
        directory: Path,
        name: str,
        endpoints: tuple[str, ...],
        s3: S3Server | None = None,
        **changes: Any,
    ) -> None:
        self.directory, self.name = directory, name
        directory.mkdir(parents=True, exist_ok=True)
        self.local = directory / "local"
        settings: dict[str, Any] = {
            "timers": {
                "heartbeat_s": 0.5,
                "lease_s": 3,
                "window_s": 4.0,
                "persist_s": 2.0,
                "retry_wait_s": 0.2,
            },
            "checkpoint": {"every_steps": 4},
            "weights": {"min_rollouts": 0, "publish_every_steps": 2, "max_lag_steps": 6},
            "slots": {"buffer": False},
        }
        for table, values in changes.items():
            settings.setdefault(table, {}).update(values)
        lines = [f'job = "{name}"']
        for table, values in settings.items():
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        lines += ["[site]", f"etcd = {json.dumps(list(endpoints))}", f'local = "{self.local}"']
        if s3 is not None:
            lines += [f's3_bucket = "{s3.bucket}"', f's3_endpoint = "{s3.url}"', f's3_prefix = "{name}"']
        self.config = directory / "job.toml"
        self.config.write_text("\n".join(lines) + "\n")
        self.settings: JobConfig = load_config(self.config)[0]
        self.keys = Keys(name)
        self.store = EtcdStore(endpoints)
        self._follower = Follower(self.store, self.keys.root)
        self._gangs: list[Gang] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._coordinate, args=(endpoints,), daemon=True)
        self._thread.start()

    def _coordinate(self, endpoints: tuple[str, ...]) -> None:
        store = EtcdStore(endpoints)
        session = Session(store, 5)
        session.open()
        keeper = SessionKeeper(session)
        keeper.start()
        coordinator = Coordinator(store, self.keys, session, {"id": "test"})
        while not self._stopping.is_set():
            coordinator.step(0.1)
        coordinator.close()
        keeper.stop()
        session.close()
        store.close()

    def start(self, world: int = 2, **options: Any) -> Gang:
        """Start a gang of the script."""
        out = self.directory / f"gang{next(_GANGS)}.out"  # another job may have used the directory
        gang = Gang(self.config, out, world, options)
        self._gangs.append(gang)
        return gang

    def view(self) -> View:
        """The job as it is now."""
        self._follower.poll(0.02)
        return View(self.keys, dict(self._follower.kvs), self._follower.revision, {})

    def request(self, uuid: str, request: Request) -> None:
        """Put an operator's wish."""
        key = self.keys.request(uuid)
        assert self.store.txn(Txn((Compare(key, "create", "=", 0),), (Put(key, encode(request)),))).succeeded

    def history(self, kind: str = "") -> list[str]:
        """Texts of the job's log."""
        from slackwater.engine.model import LogEntry

        entries = self.view().under(self.keys.logs, LogEntry).values()
        return [entry.text for entry in entries if kind in ("", entry.kind)]

    def close(self) -> None:
        """End all ranks and the coordinator."""
        for gang in self._gangs:
            gang.kill()
        self._stopping.set()
        self._thread.join(10)
        self._follower.close()
        self.store.close()


@contextlib.contextmanager
def running_job(*args: Any, **kwargs: Any) -> Iterator[Job]:
    """A job that is closed at the end of the block."""
    job = Job(*args, **kwargs)
    try:
        yield job
    finally:
        job.close()
