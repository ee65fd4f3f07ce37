"""SGLangEngine against the reference server and its faults."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tinymodel import make_tiny_model
from slackwater.adapters.sglang import SGLangEngine, SGLangTimeouts
from slackwater.engine.engineport import EngineGone
from slackwater.engine.errors import CorruptCheckpoint, EngineFault, StateMismatch, Unavailable

from .rollout_servers import Server, reference_server

pytestmark = pytest.mark.real

QUICK = SGLangTimeouts(status_seconds=1.0, token_seconds=2.0, control_seconds=2.0, load_seconds=3.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape, one with more layers, one wider."""
    root = tmp_path_factory.mktemp("models")
    return {
        "a": make_tiny_model(root / "a", seed=0),
        "b": make_tiny_model(root / "b", seed=1),
        "deep": make_tiny_model(root / "deep", seed=2, layers=3),
        "wide": make_tiny_model(root / "wide", seed=3, hidden=96),
    }


@pytest.fixture
def server(models: dict[str, Path]) -> Iterator[Server]:
    with reference_server(models["a"]) as running:
        yield running


@pytest.fixture
def engine(server: Server) -> Iterator[SGLangEngine]:
    made = SGLangEngine(server.url, timeouts=QUICK)
    yield made
    made.close()


def _switch(engine: SGLangEngine, image: Path, label: str) -> None:
    engine.pause("retract")
    try:
        engine.load(image, label)
        engine.flush(2.0)
    finally:
        engine.resume()


def test_a_load_is_proven_by_label_and_by_token(
    server: Server, engine: SGLangEngine, models: dict[str, Path]
) -> None:
    """W1: after the switch no prompt is answered from the old cache, and greedy output has changed."""
    prompt = [5, 6, 7, 8, 9]
    before = server.generate(prompt)
    assert server.generate(prompt)["meta_info"]["cached_tokens"] == 4
    engine.check_image(models["b"])
    _switch(engine, models["b"], "1.7.x")
    proof = engine.prove("1.7.x")
    assert (proof.label, proof.cached_tokens) == ("1.7.x", 0)
    after = server.generate(prompt)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["output_ids"] != before["output_ids"]
    status = engine.status()
    assert (status.label, status.model_path, status.paused) == ("1.7.x", str(models["b"]), False)
    assert status.requests_running == 0
    assert engine.describe() == "reference"
    engine.round_trip()


def test_a_cache_that_was_kept_is_found_out(
    server: Server, engine: SGLangEngine, models: dict[str, Path]
) -> None:
    """W1: an engine that says it flushed and did not fails the second proof, by its cached tokens."""
    _switch(engine, models["b"], "1")
    engine.prove("1")
    server.fault("stale_cache")
    _switch(engine, models["a"], "2")
    with pytest.raises(EngineFault, match="not dropped"):
        engine.prove("2")


def test_a_refused_flush_is_asked_again(server: Server, engine: SGLangEngine) -> None:
    """W2: five refusals, then agreement, within the deadline and not faster than the growing pauses."""
    server.fault("refuse_flush", times=5)
    started = time.monotonic()
    engine.flush(10.0)
    assert time.monotonic() - started > 1.0


def test_a_flush_that_is_always_refused_ends_with_the_reply(server: Server, engine: SGLangEngine) -> None:
    """W2: bounded by the deadline; the error carries what the engine said."""
    server.fault("refuse_flush")
    started = time.monotonic()
    with pytest.raises(EngineFault) as caught:
        engine.flush(1.0)
    assert time.monotonic() - started < 3.0
    assert "Flush cache failed" in caught.value.reply


def test_a_restart_is_seen_by_label_and_start_id(models: dict[str, Path]) -> None:
    """W4: a restarted engine has another start id and its base label, so nothing takes it for the old one."""
    with reference_server(models["a"]) as first:
        one = SGLangEngine(first.url, timeouts=QUICK)
        _switch(one, models["b"], "1.7.x")
        before = one.status()
        assert one.status().start_id == before.start_id != ""
    with pytest.raises(EngineGone):
        one.status()
    one.close()
    with (
        reference_server(models["a"]) as second,
        contextlib.closing(SGLangEngine(second.url, timeouts=QUICK)) as two,
    ):
        after = two.status()
        assert after.start_id != before.start_id
        assert after.label == "default"
        with pytest.raises(EngineFault, match="default"):
            two.prove("1.7.x")


@pytest.mark.parametrize("fault", ["unsuccessful_200", "updated_but_400"])
def test_anything_but_a_success_is_a_fault(
    server: Server, engine: SGLangEngine, models: dict[str, Path], fault: str
) -> None:
    """W5: a 200 without success and a 400 are both faults that keep the reply."""
    server.fault(fault, times=1)
    with pytest.raises(EngineFault) as caught:
        engine.load(models["b"], "1")
    assert '"success":false' in caught.value.reply


def test_a_wrong_label_fails_the_proof(server: Server, engine: SGLangEngine, models: dict[str, Path]) -> None:
    """A load that succeeded under another label is no proof."""
    server.fault("wrong_version", times=1)
    _switch(engine, models["b"], "1")
    with pytest.raises(EngineFault, match="wrong"):
        engine.prove("1")


def test_a_crash_in_mid_load_is_unknown_then_gone(
    server: Server, engine: SGLangEngine, models: dict[str, Path]
) -> None:
    """W5: the broken call says "unknown"; the next one finds nobody listening."""
    server.fault("crash_in_update")
    with pytest.raises(Unavailable):
        engine.load(models["b"], "1")
    server.process.wait(timeout=10)
    with pytest.raises(EngineGone):
        engine.status()


@pytest.mark.timeout(60)
def test_a_silent_engine_costs_no_more_than_its_deadline(
    server: Server, engine: SGLangEngine, models: dict[str, Path]
) -> None:
    """W7: every call to an engine that never answers ends with `Unavailable` at its own deadline."""
    engine.check_image(models["b"])
    server.fault("silence")
    for call, limit in (
        (engine.status, 1.0),
        (engine.round_trip, 2.0),
        (lambda: engine.pause("abort"), 2.0),
        (engine.resume, 2.0),
        (lambda: engine.flush(1.0), 1.0),
        (lambda: engine.load(models["b"], "1"), 3.0),
        (lambda: engine.prove("1"), 1.0),
    ):
        started = time.monotonic()
        with pytest.raises(Unavailable):
            call()
        assert time.monotonic() - started < limit + 1.0


def test_a_slow_load_is_unknown(server: Server, engine: SGLangEngine, models: dict[str, Path]) -> None:
    """A load that outlives its deadline is neither a success nor a failure."""
    server.fault("slow_load", times=1, seconds=6.0)
    with pytest.raises(Unavailable):
        engine.load(models["b"], "1")


def test_a_bad_image_is_refused_before_the_call(
    server: Server, engine: SGLangEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    """W9: wrong shapes, extra tensors, truncation and an absent directory never reach the engine."""
    with pytest.raises(StateMismatch) as wide:
        engine.check_image(models["wide"])
    assert "model.norm.weight" in wide.value.changed
    with pytest.raises(StateMismatch) as deep:
        engine.check_image(models["deep"])
    assert deep.value.unexpected
    with pytest.raises(CorruptCheckpoint, match="no safetensors"):
        engine.check_image(tmp_path / "absent")
    cut = tmp_path / "cut"
    shutil.copytree(models["b"], cut)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        engine.check_image(cut)
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(CorruptCheckpoint):
        engine.check_image(cut)
    assert engine.status().label == "default"


def test_a_tied_image_may_carry_its_head_or_not(tmp_path: Path) -> None:
    """Tied models save no head; the check neither misses it nor takes it for granted."""
    from slackwater.adapters.imagecheck import check_image, read_inventory

    tied = make_tiny_model(tmp_path / "tied", family="qwen2", tied=True)
    free = make_tiny_model(tmp_path / "free", family="qwen2", tied=False)
    assert "lm_head.weight" not in read_inventory(tied)
    check_image(free, tied)
    with pytest.raises(StateMismatch) as caught:
        check_image(tied, free)
    assert caught.value.missing == ("lm_head.weight",)


def test_keys_are_sent_and_never_kept(engine: SGLangEngine) -> None:
    """A reply that repeats a key is kept without it."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    seen: list[tuple[str, str | None]] = []

    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"wrong keys: alpha-key beta-key")

        def log_message(self, *_arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Echo) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{http.server_port}"
            keyed = SGLangEngine(url, api_key="alpha-key", admin_api_key="beta-key", timeouts=QUICK)
            for call in (keyed.round_trip, keyed.resume):
                with pytest.raises(EngineFault) as caught:
                    call()
                assert "-key" not in caught.value.reply + str(caught.value)
            keyed.close()
        finally:
            http.shutdown()
            thread.join()
    assert seen == [
        ("/generate", "Bearer alpha-key"),
        ("/continue_generation", "Bearer beta-key"),
    ]
