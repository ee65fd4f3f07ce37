"""The reference server's own promises: what it computes, how fast it starts, and its faults."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from examples.reference_server.faults import Faults
from examples.reference_server.model import TinyLlama
from examples.reference_server.prefixcache import PrefixCache
from examples.tinymodel import Family, make_tiny_model

from .rollout_servers import reference_server


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", False), ("qwen2", True)])
def test_the_forward_pass_is_that_of_transformers(tmp_path: Path, family: Family, tied: bool) -> None:
    """Logits agree for both families, tied and untied, with and without a cached beginning."""
    from transformers import AutoModelForCausalLM

    directory = make_tiny_model(tmp_path / "model", family=family, tied=tied, dtype=torch.float32)
    tokens = [5, 6, 7, 8, 9]
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([tokens])).logits[0, -1]
    model = TinyLlama(directory)
    whole, _ = model.forward(tokens, None)
    _, kv = model.forward(tokens[:3], None)
    resumed, _ = model.forward(tokens[3:], kv)
    torch.testing.assert_close(whole, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(resumed, whole, atol=1e-4, rtol=1e-4)


def test_a_tiny_model_is_made_of_its_seed(tmp_path: Path) -> None:
    """The same seed gives the same bytes, another seed others."""
    files = [
        (make_tiny_model(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert files[0] == files[1] != files[2]


def test_the_prefix_cache_finds_the_longest_beginning() -> None:
    """All but the last token at most; what is flushed is gone."""
    cache = PrefixCache()
    kv = [(torch.arange(4.0).view(1, 4, 1), torch.zeros(1, 4, 1))]
    cache.put([1, 2, 3, 4], kv)
    known, found = cache.find([1, 2, 3, 9, 9])
    assert known == 3
    assert found is not None
    assert found[0][0].flatten().tolist() == [0.0, 1.0, 2.0]
    assert cache.find([1, 2, 3, 4])[0] == 3
    assert cache.find([2, 3]) == (0, None)
    cache.clear()
    assert cache.find([1, 2, 3, 4]) == (0, None)


def test_faults_strike_as_often_as_told() -> None:
    """A count is used up, -1 lasts, an unknown name is refused."""
    faults = Faults()
    faults.set("refuse_flush", times=2)
    faults.set("silence")
    assert [faults.take("refuse_flush") for _ in range(3)] == [True, True, False]
    assert all(faults.take("silence") for _ in range(3))
    assert not faults.take("partial_load")
    with pytest.raises(ValueError, match="unknown fault"):
        faults.set("nonsense")


@pytest.mark.real
def test_it_starts_samples_and_shows_a_half_load(tmp_path: Path) -> None:
    """Seeds repeat a draw; a half load answers 200 and keeps some tensors; a foreign token id kills."""
    import httpx

    one = make_tiny_model(tmp_path / "one", seed=1)
    two = make_tiny_model(tmp_path / "two", seed=2)
    started = time.monotonic()
    with reference_server(one) as server:
        assert time.monotonic() - started < 25.0  # about 3 s on a quiet machine
        params = {
            "temperature": 1.0,
            "top_p": 0.9,
            "max_new_tokens": 12,
            "sampling_seed": 3,
            "ignore_eos": True,
        }
        body = {"input_ids": [4, 5], "sampling_params": params}
        draws = [server.post("/generate", body).json()["output_ids"] for _ in range(2)]
        assert draws[0] == draws[1]
        params["sampling_seed"] = 4
        assert server.post("/generate", body).json()["output_ids"] != draws[0]
        before = server.call("GET", "/weights_checker").json()["ranks"][0]["checksums"]
        assert server.post("/_fault", {"kind": "nonsense"}).status_code == 400
        server.fault("partial_load", times=1)
        assert server.update(two, "half").json()["success"] is True
        after = server.call("GET", "/weights_checker").json()["ranks"][0]["checksums"]
        changed = [name for name in before if before[name] != after[name]]
        assert 0 < len(changed) < len(before) - 5  # norms are all ones in both
        with pytest.raises(httpx.TransportError):
            server.generate([9999], 1)
        assert server.process.wait(timeout=10) != 0
