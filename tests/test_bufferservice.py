"""Promises of the buffer as a service: the same answers as in process, authenticated, fenced and bounded."""

import threading

import httpx
import pytest

from slackwater.adapters.bufferservice import BufferServer, RemoteExperienceBuffer
from slackwater.engine.errors import AuthFailed, ConfigError, Conflict, Fenced, Unavailable
from slackwater.engine.experience import ExperienceBuffer
from slackwater.engine.samples import Caller, PromptOrder, Sample

WHO = Caller(timeline=1, incarnation="trainer")


@pytest.fixture
def buffer(tmp_path):
    """An open buffer over 40 prompts."""
    order = PromptOrder([f"p{number}" for number in range(40)], epochs=1)
    with ExperienceBuffer(tmp_path / "live", prompts=order, batch_size=8, max_staleness_steps=4) as opened:
        yield opened


@pytest.fixture
def server(buffer):
    """A running service with a small bound on bodies."""
    running = BufferServer(buffer, token="secret", max_body_bytes=4096).start()
    yield running
    running.close()


@pytest.fixture
def remote(server):
    """A client that has fenced timeline 1."""
    client = RemoteExperienceBuffer(server.url, token="secret")
    client.fence(1, "trainer")
    yield client
    client.close()


def answers(remote, count, caller=WHO):
    """Dispatch and finish prompts."""
    ids = [name for item in remote.next_prompts(caller, count) for name in item.ids()]
    return [Sample(id=name, spans=((3, 0, 4), (4, 4, 9)), payload=b"\x00x", reward=0.5) for name in ids]


def test_a_whole_step_over_http(remote, tmp_path):
    """Dispatch, land, lease, train, cut and restore give what the in-process buffer gives."""
    samples = answers(remote, 12)
    assert remote.land(WHO, samples).accepted == 12
    assert remote.land(WHO, samples).duplicates == 12
    leased = remote.lease(WHO, 1, 8, key="a")
    assert leased == remote.lease(WHO, 1, 8, key="a")
    assert (leased[0].spans, leased[0].payload) == (((3, 0, 4), (4, 4, 9)), b"\x00x")
    assert remote.trained(WHO, 1) == 8
    position = remote.step_done(WHO, 1)
    part = remote.cut(1, tmp_path / "cut")
    assert part.version == position <= remote.version
    remote.committed(1)
    assert remote.apply_freshness({3: 1, 4: 1}, 1).action == "none"
    remote.fence(2, "trainer")
    remote.restore(tmp_path / "cut", part, 2)
    assert remote.statistics()["counts"]["landed"] == 4
    with pytest.raises(Fenced):
        remote.land(WHO, samples)
    with pytest.raises(Conflict):
        remote.next_prompts(Caller(timeline=5), 1)


def test_strangers_and_oversized_bodies_are_refused(server, remote):
    """No token, a wrong token, a body above the bound, rubbish: named, and nothing is written."""
    stranger = RemoteExperienceBuffer(server.url, token="guess")
    with pytest.raises(AuthFailed):
        stranger.statistics()
    stranger.close()
    huge = [Sample(id=s.id, spans=s.spans, payload=b"x" * 5000) for s in answers(remote, 1)]
    with pytest.raises(ConfigError, match="above 4096"):
        remote.land(WHO, huge)
    head = {"authorization": "Bearer secret"}
    assert httpx.post(f"{server.url}/v1/land", content=b"\xff", headers=head).status_code == 400
    assert httpx.post(f"{server.url}/v1/close", content=b"", headers=head).status_code == 404
    assert remote.statistics()["counts"]["landed"] == 0
    with pytest.raises(ConfigError):
        BufferServer(None, token="")


def test_several_drivers_append_at_once_and_a_lease_waits_for_them(remote, server):
    """Four drivers share 40 prompts without a doublet; a waiting lease wakes when enough landed."""

    def drive(number):
        client = RemoteExperienceBuffer(server.url, token="secret")
        who = Caller(timeline=1, incarnation=f"rollout-{number}")
        while samples := answers(client, 3, who):
            client.land(who, samples)
        client.close()

    drivers = [threading.Thread(target=drive, args=(number,)) for number in range(4)]
    for driver in drivers:
        driver.start()
    leased = remote.lease(WHO, 1, 8, timeout_seconds=20)
    for driver in drivers:
        driver.join()
    counts = remote.statistics()["counts"]
    assert len({sample.id for sample in leased}) == 8
    assert counts["landed"] + counts["leased"] == 40


def test_the_service_outlives_the_trainer_and_a_dead_service_is_a_dont_know(buffer, server, remote):
    """A new trainer incarnation goes on after a fence; without a service the outcome is unknown."""
    remote.land(WHO, answers(remote, 8))
    remote.close()
    second = RemoteExperienceBuffer(server.url, token="secret")
    second.fence(2, "second")
    with pytest.raises(Fenced):
        second.lease(Caller(timeline=2, incarnation="trainer"), 1, 8)
    assert len(second.lease(Caller(timeline=2, incarnation="second"), 1, 8)) == 8
    server.close()
    with pytest.raises(Unavailable):
        second.statistics()
    second.close()
