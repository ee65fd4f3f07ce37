"""The reference server gives SGLang's answers: the same calls to both, the traps included."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.tinymodel import make_tiny_model
from slackwater.adapters.sglang import SGLangEngine
from slackwater.engine.errors import EngineFault

from .rollout_servers import Server, reference_server, sglang_server

pytestmark = pytest.mark.timeout(400)

PROMPT = [5, 6, 7, 8, 9]
LONG = 400
SERVERS = [
    pytest.param("reference", marks=pytest.mark.real),
    pytest.param("sglang", marks=pytest.mark.sglang),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        "a": make_tiny_model(root / "a", seed=0),
        "b": make_tiny_model(root / "b", seed=1),
        "deep": make_tiny_model(root / "deep", seed=2, layers=3),
        "shallow": make_tiny_model(root / "shallow", seed=3, layers=1),
        "wide": make_tiny_model(root / "wide", seed=4, hidden=96),
    }
    made["empty"] = root / "empty"
    made["empty"].mkdir()
    made["absent"] = root / "absent"
    made["cut"] = root / "cut"
    shutil.copytree(made["b"], made["cut"])
    file = made["cut"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return made


@pytest.fixture(scope="module", params=SERVERS)
def shared(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server of each kind for all tests that leave it alive."""
    with _start(request.param, models["a"], tmp_path_factory.mktemp("log") / "log") as server:
        if server.kind == "reference":
            server.fault("slow_generate", seconds=0.005)  # about as slow as the real one
        yield server


def _start(kind: str, model: Path, log: Path) -> contextlib.AbstractContextManager[Server]:
    return reference_server(model) if kind == "reference" else sglang_server(model, log)


@pytest.fixture
def server(shared: Server, models: dict[str, Path]) -> Server:
    """The shared server, going and idle, with weights `a` under the label `start`."""
    shared.post("/continue_generation").raise_for_status()
    shared.post("/abort_request", {"abort_all": True})
    _until(lambda: shared.call("GET", "/flush_cache").status_code == 200)
    assert shared.update(models["a"], "start").status_code == 200
    return shared


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)


class InFlight:
    """A long generation in a thread, running once the constructor returns."""

    def __init__(self, server: Server, tokens: int = LONG) -> None:
        self.answer: dict[str, Any] = {}
        self._server, self._tokens = server, tokens
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        _until(lambda: _running(server) > 0)

    def _run(self) -> None:
        self.answer = self._server.generate([9, 8, 7, 6], self._tokens)

    @property
    def pending(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> dict[str, Any]:
        """Wait for the answer and return its meta_info."""
        self._thread.join(timeout=60)
        assert not self.pending
        meta: dict[str, Any] = self.answer["meta_info"]
        return meta


def _running(server: Server) -> int:
    return int(server.call("GET", "/v1/loads").json()["loads"][0]["num_running_reqs"])


def test_generation_is_greedy_and_shows_its_cache_and_version(
    server: Server, models: dict[str, Path]
) -> None:
    """First nothing is cached, then all but the last prompt token; other weights give other tokens."""
    first, again = server.generate(PROMPT), server.generate(PROMPT)
    assert first["output_ids"] == again["output_ids"]
    assert [first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]] == [0, 4]
    assert first["meta_info"]["weight_versions"] == [{"version": "start", "start": 0, "end": 4}]
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    reply = server.update(models["b"], "1.2.x")
    assert reply.status_code == 200
    assert reply.json()["success"] is True
    assert server.call("GET", "/model_info").json()["weight_version"] == "1.2.x"
    other = server.generate(PROMPT)
    assert other["output_ids"] != first["output_ids"]
    assert other["meta_info"]["weight_version"] == "1.2.x"
    assert other["meta_info"]["cached_tokens"] == 0


def test_both_servers_compute_the_same_model(server: Server) -> None:
    """First tokens and log probabilities agree with an independent forward pass of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(server.call("GET", "/model_info").json()["model_path"])
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    said, token, _ = server.post("/generate", body).json()["meta_info"]["output_token_logprobs"][0]
    assert token == int(logprobs.argmax())
    assert said == pytest.approx(float(logprobs[token]), abs=0.05)


def test_prompts_as_text_lists_and_copies(server: Server) -> None:
    """Text works like ids; a list or n > 1 is answered by a list; nothing at all by a 400."""
    params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    single = server.post("/generate", {"text": "copy: 9 8 7", "sampling_params": params}).json()
    assert single["meta_info"]["prompt_tokens"] == 9
    copies = server.post("/generate", {"text": "copy: 9 8 7", "sampling_params": {**params, "n": 2}}).json()
    assert [len(one["output_ids"]) for one in copies] == [3, 3]
    batch = server.post("/generate", {"text": ["copy: 9", "sort"], "sampling_params": params}).json()
    assert [one["meta_info"]["prompt_tokens"] for one in batch] == [5, 2]
    assert server.post("/generate", {"sampling_params": params}).status_code == 400


def test_control_calls_answer_alike(server: Server) -> None:
    """Status codes of what exists, what does not, and what is called wrongly; pausing twice is fine."""
    answers = [
        server.call("GET", "/ping"),
        server.call("GET", "/ready"),
        server.call("GET", "/weight_version"),
        server.call("POST", "/pause_generation"),
        server.post("/pause_generation", {"mode": "bad"}),
        server.post("/pause_generation"),
        server.post("/pause_generation", {"mode": "retract"}),
        server.call("GET", "/ready"),
        server.call("GET", "/ping"),
        server.post("/continue_generation"),
        server.post("/continue_generation"),
        server.post("/update_weights_from_disk"),
        server.post("/abort_request", {"rid": "x"}),
        server.post("/update_weight_version", {"new_version": "77"}),
        server.call("POST", "/get_weights_by_name", {"name": "model.nope"}),
        server.post("/end_weight_update"),
        server.post("/begin_weight_update", {"selector": "all"}),
        server.post("/begin_weight_update", {"selector": "all"}),
        server.post("/end_weight_update"),
    ]
    codes = [answer.status_code for answer in answers]
    assert codes == [
        200, 200, 404, 400, 400, 200, 200, 503, 200, 200, 200, 400, 200, 200, 400, 400, 200, 400, 200,
    ]  # fmt: skip
    assert server.call("GET", "/model_info").json()["weight_version"] == "77"


@pytest.mark.parametrize("image", ["absent", "empty"])
def test_an_image_that_is_not_there_is_refused(server: Server, models: dict[str, Path], image: str) -> None:
    """A 400, and weights and label stay."""
    before = server.generate(PROMPT)["output_ids"]
    reply = server.update(models[image], "no")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    after = server.generate(PROMPT)
    assert (after["output_ids"], after["meta_info"]["weight_version"]) == (before, "start")


@pytest.mark.parametrize("image", ["deep", "shallow"])
def test_an_image_of_another_depth_is_loaded_in_part(
    server: Server, models: dict[str, Path], image: str
) -> None:
    """Trap: more or fewer layers are a 200 with success, and the label moves."""
    reply = server.update(models[image], "torn")
    assert (reply.status_code, reply.json()["success"]) == (200, True)
    assert server.generate(PROMPT)["meta_info"]["weight_version"] == "torn"


def test_a_flush_is_refused_while_requests_run(server: Server) -> None:
    """400 in plain text, with either form."""
    running = InFlight(server)
    assert server.call("GET", "/flush_cache").text == "Flush cache failed.\n"
    refused = server.call("GET", "/flush_cache?timeout=0.1")
    assert (refused.status_code, refused.text) == (400, "Timed out waiting for idle state.")
    server.post("/abort_request", {"abort_all": True})
    running.end()


def test_an_unpaused_update_waits_for_running_requests(server: Server, models: dict[str, Path]) -> None:
    """Trap: it waits, updates, and then mostly answers 400 since the cache was not flushed."""
    running = InFlight(server)
    reply = server.update(models["b"], "late")
    assert reply.status_code in (200, 400)
    assert running.end()["weight_versions"] == [{"version": "start", "start": 0, "end": LONG}]
    assert server.generate(PROMPT)["meta_info"]["weight_version"] == "late"


def test_pause_abort_ends_requests_with_what_they_have(server: Server, models: dict[str, Path]) -> None:
    """HTTP 200, finish reason abort; the update behind it succeeds; later requests wait for the continue."""
    running = InFlight(server)
    server.post("/pause_generation", {"mode": "abort"})
    meta = running.end()
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] < LONG
    assert server.update(models["b"], "next").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        server.generate(PROMPT, timeout=0.5)
    server.post("/continue_generation")
    assert server.generate(PROMPT)["meta_info"]["weight_version"] == "next"


def test_pause_retract_recomputes_under_the_new_weights(server: Server, models: dict[str, Path]) -> None:
    """The connection is kept, flush and update work, and the answer shows both versions."""
    running = InFlight(server)
    server.post("/pause_generation", {"mode": "retract"})
    assert running.pending
    assert server.call("GET", "/flush_cache?timeout=0.2").status_code == 400
    assert server.call("GET", "/flush_cache").status_code == 200
    assert server.update(models["b"], "next").status_code == 200
    server.post("/continue_generation")
    meta = running.end()
    assert [span["version"] for span in meta["weight_versions"]] == ["start", "next"]
    assert (meta["weight_version"], meta["num_retractions"]) == ("next", 1)


def test_pause_in_place_tears_label_and_weights(server: Server, models: dict[str, Path]) -> None:
    """Trap: 400 with success false, yet tokens are of the new weights; /model_info says the old label."""
    running = InFlight(server)
    server.post("/pause_generation", {"mode": "in_place"})
    assert server.call("GET", "/flush_cache").status_code == 400
    reply = server.update(models["b"], "torn")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert "Weights were updated, but the cache was not flushed" in reply.json()["message"]
    assert server.call("GET", "/model_info").json()["weight_version"] == "start"
    server.post("/continue_generation")
    assert [span["version"] for span in running.end()["weight_versions"]] == ["start", "torn"]
    assert server.generate([9, 8, 7, 6], 3)["meta_info"]["cached_tokens"] == 3


def test_an_update_without_a_flush_reuses_the_old_cache(server: Server, models: dict[str, Path]) -> None:
    """Trap: `flush_cache` false keeps old KV under the new label."""
    server.generate(PROMPT)
    assert server.update(models["b"], "stale", flush_cache=False).status_code == 200
    stale = server.generate(PROMPT)
    assert (stale["meta_info"]["weight_version"], stale["meta_info"]["cached_tokens"]) == ("stale", 4)


def test_the_client_switches_proves_and_restores(server: Server, models: dict[str, Path]) -> None:
    """`SGLangEngine` with a request in flight: check, pause, load, flush, continue, prove."""
    with contextlib.closing(SGLangEngine(server.url)) as engine:
        start_id = engine.status().start_id
        assert start_id
        running = InFlight(server)
        engine.check_image(models["b"])
        engine.pause("retract")
        assert engine.status().paused is True
        engine.load(models["b"], "1.3.x")
        engine.flush(5.0)
        engine.resume()
        assert engine.prove("1.3.x").cached_tokens == 0
        assert running.end()["weight_version"] == "1.3.x"
        with pytest.raises(EngineFault, match=r"1\.4\.x"):
            engine.prove("1.4.x")
        engine.round_trip()
        status = engine.status()
        assert (status.label, status.start_id, status.paused) == ("1.3.x", start_id, False)
        assert engine.describe() == ("reference" if server.kind == "reference" else "sglang 0.5.23")


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("image", ["wide", "cut"])
def test_wrong_shapes_and_truncation_kill_the_server(
    kind: str, image: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Trap: there is no error to handle; the connection drops and the process is gone."""
    with _start(kind, models["a"], tmp_path / "log") as server:
        with pytest.raises(httpx.TransportError):
            server.post(
                "/update_weights_from_disk",
                {"model_path": str(models[image]), "weight_version": "x"},
                timeout=150.0,
            )
        assert server.process.wait(timeout=90) != 0
