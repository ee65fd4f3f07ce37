"""Starts reference and real SGLang servers for tests, and stops what it started."""

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
from typing import Any

import httpx

from slackwater.backends.child import free_ports

__all__ = ["Server", "reference_server", "sglang_server"]

ROOT = Path(__file__).parent.parent
SGLANG_START_SECONDS = 180.0
REFERENCE_START_SECONDS = 30.0


@dataclass
class Server:
    """A running server: its process, its URL, and calls to it."""

    kind: str
    url: str
    process: subprocess.Popen[bytes]

    def call(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> httpx.Response:
        """One request; errors of the connection are raised."""
        return httpx.request(method, self.url + path, json=body, timeout=timeout, trust_env=False)

    def post(self, path: str, body: Any = None, timeout: float = 60.0) -> httpx.Response:
        """POST."""
        return self.call("POST", path, {} if body is None else body, timeout)

    def generate(self, prompt: list[int], tokens: int = 4, timeout: float = 60.0) -> dict[str, Any]:
        """Greedy tokens."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        answer: dict[str, Any] = self.post("/generate", body, timeout).json()
        return answer

    def update(self, image: Path, label: str, **more: Any) -> httpx.Response:
        """Load an image from disk."""
        return self.post(
            "/update_weights_from_disk", {"model_path": str(image), "weight_version": label, **more}
        )

    def fault(self, kind: str, times: int = -1, seconds: float = 0.0) -> None:
        """Switch on a fault of the reference server."""
        self.post("/_fault", {"kind": kind, "times": times, "seconds": seconds}).raise_for_status()


@contextlib.contextmanager
def reference_server(model: Path) -> Iterator[Server]:
    """A reference server on a free port."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "examples.reference_server"]
    command += ["--model-path", str(model), "--port", str(port)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with _running("reference", command, environment, port, None, REFERENCE_START_SECONDS) as server:
        yield server


@contextlib.contextmanager
def sglang_server(model: Path, log: Path) -> Iterator[Server]:
    """The real server on a free port; its output goes to `log`."""
    from .conftest import sglang_python

    python = sglang_python()
    if python is None:
        raise FileNotFoundError("the SGLang environment is not there (make sglang-env)")
    port = free_ports(1)[0]
    options = (
        "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
        "--host 127.0.0.1 --max-total-tokens 4096 --max-running-requests 8 --disable-cuda-graph "
        "--disable-overlap-schedule --mem-fraction-static 0.3 --skip-server-warmup --sleep-on-idle"
    )
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
    environment = dict(
        os.environ,
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        SGLANG_USE_CPU_ENGINE="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT / "examples" / "sglang_cpu"),
    )
    with _running(
        "sglang", [*command, *options.split()], environment, port, log, SGLANG_START_SECONDS
    ) as server:
        yield server


@contextlib.contextmanager
def _running(
    kind: str, command: list[str], environment: dict[str, str], port: int, log: Path | None, seconds: float
) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        stack.callback(_stop, process)
        server = Server(kind, f"http://127.0.0.1:{port}", process)
        _wait_until_up(server, seconds)
        yield server


def _wait_until_up(server: Server, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"{server.kind} ended with {server.process.returncode} while it started")
        with contextlib.suppress(httpx.TransportError):
            if server.call("GET", "/health", timeout=25.0).status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{server.kind} did not start within {seconds:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to its whole session, so that no scheduler stays behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=15)
