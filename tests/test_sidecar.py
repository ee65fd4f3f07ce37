"""The sidecar on a real etcd, with a real coordinator and reference servers: joins, is quarantined, comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest
from safetensors.torch import load_file

from examples.tinymodel import make_tiny_model
from slackwater.adapters.export import read_hf_files, write_image
from slackwater.adapters.imagestore import DirectoryImages
from slackwater.adapters.intents import FileIntents
from slackwater.adapters.sglang import SGLangEngine, SGLangTimeouts
from slackwater.adapters.sidecar import Sidecar
from slackwater.backends.child import free_ports
from slackwater.backends.embedded import EtcdCluster
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.action import put
from slackwater.engine.config import JobConfig
from slackwater.engine.model import Request
from slackwater.engine.ports import Compare, Txn

from .rollout_servers import ROOT, Server
from .scripted_trainer import ScriptedTrainer, ThreadBeat, Watcher, fast_config, running_job

pytestmark = pytest.mark.real

TIMEOUTS = SGLangTimeouts(status_seconds=0.8, token_seconds=4.0, control_seconds=4.0, load_seconds=10.0)


class Engine:
    """A reference server that can be killed and started again at its address, with base weights."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def server(self) -> Server:
        """Calls to it."""
        assert self.process is not None
        return Server("reference", self.url, self.process)

    def begin(self) -> None:
        """Start the process; `ready` waits."""
        command = [sys.executable, "-m", "examples.reference_server"]
        command += ["--model-path", str(self.model), "--port", str(self.port)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(os.environ, OMP_NUM_THREADS="1"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ready(self, seconds: float = 60.0) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.server.call("GET", "/ping", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError("the reference server did not start")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def label(self) -> str:
        """What it says that it serves."""
        return str(self.server.call("GET", "/model_info").json()["weight_version"])


@dataclass(frozen=True)
class Images:
    """A base model, two published images of other weights, and what a publication says about them."""

    base: Path
    one: tuple[Path, str]
    two: tuple[Path, str]


def make_image(root: Path, seed: int) -> tuple[Path, str]:
    """An image as the trainer publishes it: its directory and digest."""
    model = make_tiny_model(root / f"m{seed}", seed=seed, layers=1, hidden=32)
    tensors = load_file(model / "model.safetensors")
    record = write_image(root / "images" / f"w{seed}", iter(tensors.items()), read_hf_files(model))
    return root / "images" / f"w{seed}", record.digest


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """Real images, made once."""
    root = tmp_path_factory.mktemp("weights")
    base = make_tiny_model(root / "base", seed=0, layers=1, hidden=32)
    return Images(base, make_image(root, 1), make_image(root, 2))


@pytest.fixture(scope="module")
def fleet(images: Images) -> Iterator[list[Engine]]:
    """Three engines for all tests of this file; whoever kills one leaves it dead."""
    engines = [Engine(images.base) for _ in range(3)]
    try:
        for engine in engines:
            engine.begin()
        for engine in engines:
            engine.ready()
        yield engines
    finally:
        for engine in engines:
            engine.kill()


@pytest.fixture
def engines(fleet: list[Engine]) -> list[Engine]:
    """The fleet, all alive."""
    dead = [engine for engine in fleet if engine.process is None or engine.process.poll() is not None]
    for engine in dead:
        engine.begin()
    for engine in dead:
        engine.ready()
    return fleet


@dataclass
class Bench:
    """One job with its trainer, and the sidecars that a test starts."""

    store: EtcdStore
    config: JobConfig
    watch: Watcher
    trainer: ScriptedTrainer
    directory: Path
    sidecars: list[Sidecar]
    beats: list[ThreadBeat]

    def attach(self, engine: Engine, name: str, store: EtcdStore | None = None) -> Sidecar:
        """Start a sidecar in a thread."""
        store = store or self.store

        def make_beat() -> ThreadBeat:
            self.beats.append(ThreadBeat(store, self.watch.keys, name, self.config))
            return self.beats[-1]

        sidecar = Sidecar(
            self.config,
            store,
            make_beat,
            SGLangEngine(engine.url, timeouts=TIMEOUTS),
            name=name,
            url=engine.url,
            images=DirectoryImages(),
            intents=FileIntents(self.directory / name),
            flush_seconds=1.0,
        )
        self.sidecars.append(sidecar)
        sidecar.start()
        return sidecar

    def request(self, uuid: str, request: Request) -> None:
        """Put an operator's wish."""
        key = self.watch.keys.request(uuid)
        assert self.store.txn(Txn((Compare(key, "create", "=", 0),), (put(key, request),))).succeeded

    def checkpoint(self) -> int:
        """Ask for a checkpoint and wait for it."""
        before = self.watch.view.last_checkpoint
        self.request(f"ckpt-{before}", Request(kind="checkpoint"))
        return self.watch.wait(lambda v: v.last_checkpoint > before, "a checkpoint").last_checkpoint


@pytest.fixture
def bench(store: EtcdStore, job: str, images: Images, tmp_path: Path) -> Iterator[Bench]:
    """A running job that has published version 1."""
    config = fast_config(job)
    with running_job(store, config) as watch:
        trainer = ScriptedTrainer(store, config, *images.one)
        trainer.start()
        bench = Bench(store, config, watch, trainer, tmp_path, [], [])
        try:
            watch.wait(lambda v: v.go is not None, "the grant")
            yield bench
        finally:
            for sidecar in bench.sidecars:
                sidecar.stop()
            trainer.stop()


def test_joins_follows_votes_and_says_goodbye(bench: Bench, engines: list[Engine], images: Images) -> None:
    """A rollout loads the head in full, proves it, is routed, follows, votes in a round, and leaves cleanly."""
    sidecar = bench.attach(engines[0], "rollout-0")
    view = bench.watch.routed("rollout-0", 1)
    route = view.routes()["rollout-0"]
    assert route.url == engines[0].url
    assert route.label == engines[0].label() == f"1.1.{route.incarnation}"
    assert bench.trainer.publish(*images.two) == 2
    bench.watch.routed("rollout-0", 2)
    alive = bench.watch.wait(
        lambda v: (a := v.alive("rollout-0")) is not None and a.state == "rollout_in_progress", "reported"
    ).alive("rollout-0")
    assert alive is not None
    assert alive.weight_version == 2
    votes = []

    def saw_vote(view: object) -> bool:
        current = bench.watch.view
        if current.round is not None and "rollout-0" in current.votes(current.round.round):
            votes.append(current.votes(current.round.round)["rollout-0"])
        return current.last_checkpoint == 1

    bench.request("c1", Request(kind="checkpoint"))
    bench.watch.wait(saw_vote, "checkpoint 1")
    assert bench.watch.view.checkpoints()[1].weight_version == 2
    sidecar.stop()
    bench.watch.unrouted("rollout-0", 5.0)
    bench.watch.wait(lambda v: v.participant("rollout-0") is None, "forgotten after a goodbye")


def test_W4_killed_engine_is_evidence_and_base_weights_are_never_routed(
    bench: Bench, engines: list[Engine], images: Images
) -> None:
    """SIGKILL of the engine takes the route and gives hard evidence; restarted, it must prove the head first."""
    bench.attach(engines[0], "rollout-0")
    first = bench.watch.routed("rollout-0", 1).routes()["rollout-0"]
    engines[0].kill()
    killed = time.monotonic()
    bench.watch.unrouted("rollout-0")
    view = bench.watch.wait(
        lambda v: (h := v.health("rollout-0")) is not None and h.state == "failed", "a verdict"
    )
    assert time.monotonic() - killed < bench.config.timers.lease_s + bench.config.timers.window_s
    health = view.health("rollout-0")
    assert health is not None
    assert health.evidence.startswith("exited: the engine is gone")
    assert bench.trainer.publish(*images.two) == 2
    seen = bench.watch.view.revision
    engines[0].begin()
    engines[0].ready()
    route = bench.watch.routed("rollout-0", 2).routes()["rollout-0"]
    assert route.incarnation != first.incarnation
    assert route.label == engines[0].label()
    with contextlib.closing(bench.store.watch(bench.watch.keys.routes, seen)) as history:
        batch = history.next(5.0)
    assert batch is not None
    assert all(b'"version":2' in event.kv.value for event in batch.events if event.kind == "put")


def test_W7_silent_engine_is_left_alone(bench: Bench, engines: list[Engine], images: Images) -> None:
    """An engine that accepts and never answers loses route and lease; the two others go on to the next versions."""
    for number, engine in enumerate(engines):
        bench.attach(engine, f"rollout-{number}")
    for number in range(3):
        bench.watch.routed(f"rollout-{number}", 1)
    os.kill(engines[2].server.process.pid, signal.SIGSTOP)
    try:
        assert bench.trainer.publish(*images.two) == 2
        bench.watch.routed("rollout-0", 2, 10.0)
        bench.watch.routed("rollout-1", 2, 10.0)
        bench.watch.wait(
            lambda v: "rollout-2" not in v.routes() and v.alive("rollout-2") is None,
            "rollout-2 without a lease",
        )
        assert set(bench.watch.view.routes()) == {"rollout-0", "rollout-1"}
    finally:
        os.kill(engines[2].server.process.pid, signal.SIGCONT)
    bench.watch.routed("rollout-2", 2)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("refuse_flush", "refused to flush"),
        ("unsuccessful_200", "Failed to update weights on rank 1"),
        ("wrong_version", "'wrong'"),
        ("partial_load", "loaded in part"),
        ("updated_but_400", "the cache was not flushed"),
    ],
)
def test_W2_W5_failed_update_quarantines_that_engine_alone(
    bench: Bench, engines: list[Engine], images: Images, fault: str, says: str
) -> None:
    """Anything but a proven success takes that engine's route, keeps its words, and ends with a good load."""
    bench.attach(engines[0], "rollout-0")
    bench.attach(engines[1], "rollout-1")
    bench.watch.routed("rollout-0", 1)
    bench.watch.routed("rollout-1", 1)
    engines[1].server.fault(fault)
    try:
        assert bench.trainer.publish(*images.two) == 2
        bench.watch.routed("rollout-0", 2)
        bench.watch.unrouted("rollout-1")
        view = bench.watch.wait(
            lambda v: (a := v.alive("rollout-1")) is not None and says in a.note, f"a note with {says!r}"
        )
        assert set(view.routes()) == {"rollout-0"}
    finally:
        engines[1].server.fault(fault, times=0)
    bench.watch.routed("rollout-1", 2)
    assert engines[1].label() == bench.watch.view.routes()["rollout-1"].label


def test_W5_crash_in_mid_update(bench: Bench, engines: list[Engine], images: Images) -> None:
    """An engine that dies while it loads is failed on evidence, the other goes on; restarted, it is loaded in full."""
    bench.attach(engines[0], "rollout-0")
    bench.attach(engines[1], "rollout-1")
    bench.watch.routed("rollout-0", 1)
    bench.watch.routed("rollout-1", 1)
    engines[1].server.fault("crash_in_update")
    assert bench.trainer.publish(*images.two) == 2
    bench.watch.routed("rollout-0", 2)
    bench.watch.wait(
        lambda v: (h := v.health("rollout-1")) is not None and h.state == "failed", "a verdict on evidence"
    )
    assert "rollout-1" not in bench.watch.view.routes()
    assert FileIntents(bench.directory / "rollout-1").pending().startswith("1.2.")
    engines[1].kill()
    engines[1].begin()
    engines[1].ready()
    bench.watch.routed("rollout-1", 2)
    assert FileIntents(bench.directory / "rollout-1").pending() == ""


def test_label_changed_behind_our_back(bench: Bench, engines: list[Engine]) -> None:
    """Somebody else's label on the engine takes the route at the next beat; a full load brings it back."""
    bench.attach(engines[0], "rollout-0")
    bench.watch.routed("rollout-0", 1)
    seen = bench.watch.view.revision
    engines[0].server.post("/update_weight_version", {"new_version": "meddled"}).raise_for_status()
    bench.watch.wait(
        lambda v: "rollout-0" not in v.routes() or engines[0].label() != "meddled", "a reaction", 5.0
    )
    bench.watch.routed("rollout-0", 1)
    assert engines[0].label() == bench.watch.view.routes()["rollout-0"].label
    with contextlib.closing(bench.store.watch(bench.watch.keys.routes, seen + 1)) as history:
        batch = history.next(5.0)
    assert batch is not None
    assert batch.events[0].kind == "delete"


def test_recovery_stops_and_reloads(bench: Bench, engines: list[Engine], images: Images) -> None:
    """A rollback fences the rollout; it answers on the new timeline and is routed only with its full version."""
    bench.attach(engines[0], "rollout-0")
    before = bench.watch.routed("rollout-0", 1).routes()["rollout-0"]
    assert bench.checkpoint() == 1
    assert bench.trainer.publish(*images.two) == 2
    bench.watch.routed("rollout-0", 2)
    bench.trainer.image = images.one
    bench.request("back", Request(kind="rollback", checkpoint=1))
    bench.watch.wait(lambda v: v.timeline == 2 and v.go is not None, "the recovery's end")
    view = bench.watch.routed("rollout-0", 3)
    route = view.routes()["rollout-0"]
    assert (route.timeline, route.incarnation) == (2, before.incarnation)
    assert route.label == engines[0].label() == f"2.3.{before.incarnation}"
    prompt = [5, 6, 7, 8]
    assert engines[0].server.generate(prompt)["meta_info"]["weight_version"] == route.label


def test_lost_lease_is_a_new_life_with_a_full_load(bench: Bench, engines: list[Engine]) -> None:
    """A beat that fell silent for good ends this life: the route goes with the lease, the next life loads anew."""
    bench.attach(engines[0], "rollout-0")
    first = bench.watch.routed("rollout-0", 1).routes()["rollout-0"]
    bench.beats[-1].silence()
    bench.watch.unrouted("rollout-0")
    second = bench.watch.routed("rollout-0", 1).routes()["rollout-0"]
    assert second.incarnation != first.incarnation
    assert engines[0].label() == second.label


@pytest.mark.parametrize("away_seconds", [1.0, 6.0])
def test_rides_out_etcd(
    own_etcd: EtcdCluster,
    job: str,
    engines: list[Engine],
    images: Images,
    tmp_path: Path,
    away_seconds: float,
) -> None:
    """etcd stands still for less and for more than a lease: afterwards the rollout has a route and follows."""
    config = fast_config(job, window_s=20.0)
    store = EtcdStore(own_etcd.endpoints, call_timeout_seconds=0.6)
    with contextlib.closing(store), running_job(store, config) as watch:
        trainer = ScriptedTrainer(store, config, *images.one)
        trainer.start()
        bench = Bench(store, config, watch, trainer, tmp_path, [], [])
        sidecar = bench.attach(engines[0], "rollout-0")
        try:
            watch.routed("rollout-0", 1)
            own_etcd.member(0).pause()
            time.sleep(away_seconds)
            own_etcd.member(0).resume()
            watch.wait(lambda v: "rollout-0" in v.routes(), "a route", 40.0)
            assert sidecar.running
        finally:
            sidecar.stop()
            trainer.stop()


# -- as a process of its own ---------------------------------------------------------------------------------


@contextlib.contextmanager
def sidecar_process(
    bench: Bench, etcd: EtcdCluster, engine: Engine, images: Images
) -> Iterator[subprocess.Popen[bytes]]:
    """`run_sglang` in a process, with its real beat beside it."""
    site = {
        "etcd": list(etcd.endpoints),
        "local": str(bench.directory / "local"),
        "images": str(images.one[0].parent),
    }
    code = (
        "import sys, msgspec; from slackwater.engine.config import JobConfig, Site;"
        "from slackwater.adapters.sidecar_sglang import run_sglang;"
        "run_sglang(msgspec.json.decode(sys.argv[1], type=JobConfig), msgspec.json.decode(sys.argv[2], type=Site),"
        " url=sys.argv[3], name='rollout-0'); sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    arguments = [msgspec.json.encode(bench.config).decode(), msgspec.json.encode(site).decode(), engine.url]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_sidecar_process_ends_with_0_on_sigterm_and_has_no_torch(
    bench: Bench, etcd: EtcdCluster, engines: list[Engine], images: Images
) -> None:
    """SIGTERM takes the route, tells the job goodbye and exits with 0; torch was never imported."""
    with sidecar_process(bench, etcd, engines[0], images) as process:
        bench.watch.routed("rollout-0", 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0
        bench.watch.wait(lambda v: v.participant("rollout-0") is None, "forgotten after a goodbye", 10.0)
        assert "rollout-0" not in bench.watch.view.routes()


def test_killed_sidecar_is_evidence_and_its_successor_loads_in_full(
    bench: Bench, etcd: EtcdCluster, engines: list[Engine], images: Images
) -> None:
    """SIGKILL of the sidecar: its beat says that it exited; with a call still pending, the next one proves all anew."""
    with sidecar_process(bench, etcd, engines[0], images) as process:
        first = bench.watch.routed("rollout-0", 1).routes()["rollout-0"]
        process.kill()
        view = bench.watch.wait(
            lambda v: (h := v.health("rollout-0")) is not None and h.state == "failed", "a verdict", 10.0
        )
        assert "rollout-0" not in view.routes()
    intents = FileIntents(bench.directory / "local" / "sidecars" / bench.config.job / "rollout-0")
    intents.begin(first.label)
    with sidecar_process(bench, etcd, engines[0], images):
        second = bench.watch.routed("rollout-0", 1).routes()["rollout-0"]
        assert second.incarnation != first.incarnation
        assert engines[0].label() == second.label
        assert intents.pending() == ""
