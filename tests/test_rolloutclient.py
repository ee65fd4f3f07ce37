"""The rollout client: who is asked, what is sent, what is made of the answers, and how long a call waits."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slackwater.adapters.rolloutclient import Answer, Label, RolloutClient, parse_label
from slackwater.backends.etcd import EtcdStore
from slackwater.engine.errors import Unavailable
from slackwater.engine.keys import Keys
from slackwater.engine.model import Record, Recovery, Route, Sampling, Timeline, encode
from slackwater.engine.ports import Delete, Put, Txn

INCARNATION = "r0.aa"


class Engine:
    """A server with SGLang's /generate, whose answers a test may change; it keeps what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        self.versions = [{"version": f"1.7.{INCARNATION}", "start": 0, "end": 3}]
        self.finish = "length"
        self.raw: bytes | None = None
        self.hold = threading.Event()
        self.hold.set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.asked.append({"path": self.path, **body})
                engine.hold.wait(30)
                data = engine.raw
                if data is None:
                    data = json.dumps([engine.item(prompt) for prompt in body["input_ids"]]).encode()
                self.send_response(engine.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def item(self, prompt: list[int]) -> dict[str, Any]:
        """The answer to one prompt: its last token, three times."""
        return {
            "text": self.name,
            "output_ids": [prompt[-1]] * 3,
            "meta_info": {
                "finish_reason": {"type": self.finish},
                "weight_versions": self.versions,
                "output_token_logprobs": [[-0.5, prompt[-1], None]] * 3,
            },
        }

    def stop(self) -> None:
        """Refuse connections from now on."""
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Job:
    """The keys of a job that only a test writes."""

    def __init__(self, store: EtcdStore, name: str) -> None:
        self.store, self.keys = store, Keys(name)

    def put(self, key: str, record: Record) -> None:
        self.store.txn(Txn((), (Put(key, encode(record)),)))

    def route(self, engine: Engine, incarnation: str = INCARNATION) -> None:
        record = Route(name=engine.name, url=engine.url, version=7, timeline=1, incarnation=incarnation)
        self.put(self.keys.route(engine.name), record)

    def unroute(self, engine: Engine) -> None:
        self.store.txn(Txn((), (Delete(self.keys.route(engine.name)),)))


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Two engines without a route yet."""
    made = [Engine("a"), Engine("b")]
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture
def work(store: EtcdStore, job: str) -> Job:
    """A job on timeline 1."""
    made = Job(store, job)
    made.put(made.keys.timeline, Timeline(timeline=1))
    return made


@pytest.fixture
def client(work: Job, job: str) -> Iterator[RolloutClient]:
    """A client that follows the job."""
    made = RolloutClient(work.store, job, request_timeout_seconds=5.0).start()
    yield made
    made.close()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.02)


# -- labels and answers ------------------------------------------------------------------------------------


def test_a_label_has_three_parts_and_the_incarnation_may_hold_dots() -> None:
    """Timeline, version, and everything after them."""
    assert parse_label("2.39.rollout-1.ab12") == Label(timeline=2, version=39, incarnation="rollout-1.ab12")


@pytest.mark.parametrize("text", ["", "default", "1.2", "a.2.x", "1.b.x", "-1.2.x", "1. 2.x"])
def test_what_is_no_label_is_none(text: str) -> None:
    """An engine that was never synced calls its weights something else."""
    assert parse_label(text) is None


def test_an_answer_is_as_old_as_its_oldest_token() -> None:
    """The oldest version counts, wherever it stands; one version in two spans is not mixed."""

    def made(*spans: tuple[int, int, int]) -> Answer:
        return Answer(
            token_ids=(1, 2, 3),
            text="",
            logprobs=(),
            spans=spans,
            timelines=frozenset({1}),
            sampling_revision=1,
            rollout="a",
        )

    assert (made((9, 0, 1), (4, 1, 2), (7, 2, 3)).oldest_version, made((9, 0, 1), (4, 1, 3)).mixed) == (
        4,
        True,
    )
    assert not made((5, 0, 1), (5, 1, 3)).mixed


# -- who is asked ------------------------------------------------------------------------------------------


def test_engines_with_a_route_are_asked_in_turn_and_no_others(
    work: Job, engines: list[Engine], client: RolloutClient
) -> None:
    """A route that comes is used, one that goes is not used any more."""
    first, second = engines
    work.route(first)
    assert [answer.rollout for answer in client.generate([[1, 5], [1, 6]], timeout_seconds=10)] == ["a", "a"]
    work.route(second)
    until(lambda: len(client.routes) == 2)
    asked = {client.generate([[1, 5]], timeout_seconds=10)[0].rollout for _ in range(4)}
    assert asked == {"a", "b"}
    work.unroute(first)
    until(lambda: list(client.routes) == ["b"])
    before = len(first.asked)
    assert all(client.generate([[1, 5]], timeout_seconds=10)[0].rollout == "b" for _ in range(3))
    assert len(first.asked) == before


def test_the_answers_are_in_the_order_of_the_prompts_with_the_engines_word(
    work: Job, engines: list[Engine], client: RolloutClient
) -> None:
    """Tokens, logprobs, versions and timelines are what the engine's meta_info says."""
    engines[0].versions = [
        {"version": f"2.9.{INCARNATION}", "start": 0, "end": 1},
        {"version": f"1.4.{INCARNATION}", "start": 1, "end": 3},
    ]
    work.route(engines[0])
    answers = client.generate([[1, 5], [1, 6]], timeout_seconds=10)
    assert [answer.token_ids for answer in answers] == [(5, 5, 5), (6, 6, 6)]
    assert answers[0].spans == ((9, 0, 1), (4, 1, 3))
    assert answers[0].timelines == {1, 2}
    assert answers[0].logprobs == (-0.5, -0.5, -0.5)
    assert (answers[0].oldest_version, answers[0].mixed) == (4, True)


def test_the_parameters_in_force_are_sent_and_their_revision_is_kept(
    work: Job, engines: list[Engine], client: RolloutClient
) -> None:
    """A change in etcd reaches the next request, and every answer says by which revision it was made."""
    work.put(work.keys.sampling, Sampling(revision=3, parameters={"temperature": 0.5, "max_new_tokens": 3}))
    work.route(engines[0])
    assert client.generate([[1, 5]], timeout_seconds=10)[0].sampling_revision == 3
    asked = engines[0].asked[-1]
    assert asked["path"] == "/generate"
    assert asked["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 3}
    assert asked["return_logprob"] is True
    work.put(work.keys.sampling, Sampling(revision=4, parameters={"temperature": 0.9}))
    until(lambda: client.generate([[1, 5]], timeout_seconds=10)[0].sampling_revision == 4)
    assert engines[0].asked[-1]["sampling_params"] == {"temperature": 0.9}


# -- engines that fail -------------------------------------------------------------------------------------


def test_a_dead_engine_costs_nothing_but_the_question(
    work: Job, engines: list[Engine], client: RolloutClient
) -> None:
    """While its route still stands, every call is answered by the other one."""
    for engine in engines:
        work.route(engine)
    until(lambda: len(client.routes) == 2)
    engines[0].stop()
    engines[0].stop = lambda: None  # type: ignore[method-assign]
    for _ in range(4):
        assert client.generate([[1, 5]], timeout_seconds=10)[0].rollout == "b"


@pytest.mark.parametrize(
    "fault", ["500", "prose", "too few", "unnamed weights", "foreign weights", "no meta_info"]
)
def test_what_cannot_be_used_is_asked_elsewhere(
    fault: str, work: Job, engines: list[Engine], client: RolloutClient
) -> None:
    """An error, something unreadable, or weights that nobody has named: the other engine answers."""
    bad = engines[0]
    if fault == "500":
        bad.status = 500
    elif fault == "unnamed weights":
        bad.versions = []
    elif fault == "foreign weights":
        bad.versions = [{"version": "default", "start": 0, "end": 3}]
    else:
        bad.raw = {"prose": b"well, no", "too few": b"[]", "no meta_info": b'[{"output_ids": [1]}]'}[fault]
    for engine in engines:
        work.route(engine)
    until(lambda: len(client.routes) == 2)
    for _ in range(3):
        assert client.generate([[1, 5]], timeout_seconds=10)[0].rollout == "b"
    assert bad.asked


def test_an_answer_that_was_cut_short_is_asked_again(
    work: Job, engines: list[Engine], client: RolloutClient
) -> None:
    """An aborted answer is no answer; with one engine alone it is asked again after a moment, not in a hot loop."""
    engines[0].finish = "abort"
    work.route(engines[0])
    found: list[Answer] = []
    caller = threading.Thread(target=lambda: found.extend(client.generate([[1, 5]], timeout_seconds=20)))
    caller.start()
    until(lambda: len(engines[0].asked) >= 2)
    assert len(engines[0].asked) < 5
    engines[0].finish = "length"
    caller.join(10)
    assert [answer.token_ids for answer in found] == [(5, 5, 5)]


# -- waiting -----------------------------------------------------------------------------------------------


def test_without_a_route_a_call_waits_until_its_deadline(client: RolloutClient) -> None:
    """Then it says that there was none."""
    began = time.monotonic()
    with pytest.raises(Unavailable, match="routes: none"):
        client.generate([[1, 5]], timeout_seconds=1.0)
    assert 0.9 < time.monotonic() - began < 4.0


def test_a_route_that_comes_ends_the_wait(work: Job, engines: list[Engine], client: RolloutClient) -> None:
    """The call that waited is answered."""
    timer = threading.Timer(0.5, work.route, args=(engines[0],))
    timer.start()
    assert client.generate([[1, 5]], timeout_seconds=10)[0].rollout == "a"
    timer.join()


@pytest.mark.parametrize("routed", [False, True])
def test_close_wakes_who_waits(routed: bool, work: Job, job: str, engines: list[Engine]) -> None:
    """Without a route at once, in an answer that does not come after the request's timeout: `Unavailable`."""
    client = RolloutClient(work.store, job, request_timeout_seconds=5.0).start()
    if routed:
        engines[0].hold.clear()
        work.route(engines[0])
    errors: list[BaseException] = []

    def call() -> None:
        try:
            client.generate([[1, 5]], timeout_seconds=60)
        except Unavailable as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    if routed:
        until(lambda: bool(engines[0].asked))
    client.close()
    client.close()
    caller.join(10)
    assert not caller.is_alive()
    assert len(errors) == 1


def test_the_timeline_is_unknown_while_a_recovery_is_open(work: Job, client: RolloutClient) -> None:
    """Callers of the buffer get 0 then, and the new timeline afterwards."""
    until(lambda: client.timeline == 1)
    work.put(work.keys.timeline, Timeline(timeline=2))
    until(lambda: client.timeline == 2)
    work.put(work.keys.recovery, Recovery(recovery=3, cause="a test"))
    until(lambda: client.timeline == 0)
