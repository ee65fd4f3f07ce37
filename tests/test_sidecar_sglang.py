"""The sidecar with the real SGLang server: joins, follows two versions, is proven and routed, and sees it die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.tinymodel import make_tiny_model
from slackwater.adapters.export import read_hf_files, write_image
from slackwater.adapters.imagestore import DirectoryImages
from slackwater.adapters.intents import FileIntents
from slackwater.adapters.sglang import SGLangEngine
from slackwater.adapters.sidecar import Sidecar
from slackwater.backends.etcd import EtcdStore

from .rollout_servers import sglang_server
from .scripted_trainer import ScriptedTrainer, ThreadBeat, fast_config, running_job


def image(root: Path, seed: int) -> tuple[Path, str]:
    """A published image of other weights, and its digest."""
    model = make_tiny_model(root / f"m{seed}", seed=seed)
    tensors = load_file(model / "model.safetensors")
    record = write_image(root / f"w{seed}", iter(tensors.items()), read_hf_files(model))
    return root / f"w{seed}", record.digest


@pytest.mark.sglang
@pytest.mark.timeout(300)
def test_real_server_is_followed_proven_and_missed(store: EtcdStore, job: str, tmp_path: Path) -> None:
    """Two versions load into the real server under our labels, its output changes, and SIGKILL is hard evidence."""
    config = fast_config(job)
    first, second = image(tmp_path, 1), image(tmp_path, 2)
    base = make_tiny_model(tmp_path / "base", seed=0)
    with sglang_server(base, tmp_path / "server.log") as server, running_job(store, config) as watch:
        trainer = ScriptedTrainer(store, config, *first)
        trainer.start()
        sidecar = Sidecar(
            config,
            store,
            lambda: ThreadBeat(store, watch.keys, "rollout-0", config),
            SGLangEngine(server.url),
            name="rollout-0",
            url=server.url,
            images=DirectoryImages(tmp_path),
            intents=FileIntents(tmp_path / "intents"),
        )
        sidecar.start()
        try:
            prompt = [5, 6, 7, 8]
            outputs = []
            for version in (1, 2):
                route = watch.routed("rollout-0", version, 60.0).routes()["rollout-0"]
                assert route.label == f"1.{version}.{route.incarnation}"
                answer = server.generate(prompt, tokens=8)
                assert answer["meta_info"]["weight_version"] == route.label
                outputs.append(answer["output_ids"])
                if version == 1:
                    assert trainer.publish(*second) == 2
            assert outputs[0] != outputs[1]
            os.killpg(server.process.pid, signal.SIGKILL)
            watch.unrouted("rollout-0")
            view = watch.wait(
                lambda v: (h := v.health("rollout-0")) is not None and h.state == "failed", "a verdict"
            )
            health = view.health("rollout-0")
            assert health is not None
            assert health.evidence.startswith("exited:")
            assert sidecar.running
        finally:
            sidecar.stop()
            trainer.stop()
