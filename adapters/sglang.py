"""SGLang as a `RolloutEngine`: weights from disk, proven by the server's label and by a fresh token.

What the server does when something is wrong shapes this file: it half-loads with a 200, dies on wrong
shapes, answers 400 after it has updated, and dies of a token id beyond its vocabulary. So an image is checked
before the call, and an answer counts only after a proof.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.engineport import EngineStatus, PauseMode, Proof
from ..engine.errors import ConfigError, EngineFault, Unavailable
from .contentcheck import ROWS, first_rows, is_other, sample_names
from .imagecheck import check_image, read_config
from .sglang_http import REPLY_CHARACTERS, Reply, SGLangHttp

__all__ = ["SGLangEngine", "SGLangTimeouts"]

_CANARY_TOKENS = 8
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangTimeouts:
    """Total seconds that each kind of call may take."""

    status_seconds: float = 5.0
    """All calls of one `status` together."""
    token_seconds: float = 30.0
    """One generated token (`round_trip`, `prove`); longer than the queue in front of it."""
    control_seconds: float = 30.0
    """Pause, continue, and one try of a flush."""
    load_seconds: float = 600.0
    """One load from disk."""


class SGLangEngine:
    """One SGLang server behind its URL. The constructor does no I/O; the server's process is not ours."""

    def __init__(
        self,
        url: str,
        *,
        model_path: Path | None = None,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        timeouts: SGLangTimeouts | None = None,
    ) -> None:
        """`model_path` is the served model's directory as this host sees it (default: what the server was
        started with); images are compared with it.
        """
        self.timeouts = timeouts or SGLangTimeouts()
        self._http = SGLangHttp(url, api_key, admin_api_key)
        self._model_path = model_path
        self._wake = threading.Event()

    def describe(self) -> str:
        """`sglang <version>`, or `reference`."""
        info = self._server_info(self.timeouts.status_seconds)
        return "reference" if info.get("frontend") == "reference" else f"sglang {info.get('version', '?')}"

    def status(self) -> EngineStatus:
        """Label and path from /model_info; the rest as far as it is said in time ("" or None: not said)."""
        deadline = time.monotonic() + self.timeouts.status_seconds
        info = _object(self._ok("GET", "/model_info", self.timeouts.status_seconds))
        label = info.get("weight_version")
        if not isinstance(label, str):
            raise EngineFault("/model_info has no weight_version", json.dumps(info)[:REPLY_CHARACTERS])
        return EngineStatus(
            label=label,
            start_id=self._start_id(deadline),
            model_path=str(info.get("model_path", "")),
            paused=self._paused(deadline),
            requests_running=self._requests_running(deadline),
        )

    def round_trip(self) -> None:
        """Generate one token. `Unavailable` when the scheduler does not answer (or is paused)."""
        self._token([1])

    def check_image(self, image: Path) -> None:
        """Compare an image with the served model by safetensors headers, without the engine."""
        check_image(image, self._model())

    def pause(self, mode: PauseMode) -> None:
        """POST /pause_generation."""
        self._ok("POST", "/pause_generation", self.timeouts.control_seconds, {"mode": mode}, control=True)

    def resume(self) -> None:
        """POST /continue_generation."""
        self._ok("POST", "/continue_generation", self.timeouts.control_seconds, {}, control=True)

    def load(self, image: Path, label: str) -> None:
        """POST /update_weights_from_disk and take nothing but a stated success.

        Pause first: an update that waits for running requests is answered with a 400 after it has been made.
        """
        if not label:
            raise ConfigError("a weight label must not be empty")
        body = {"model_path": str(image), "weight_version": label, "flush_cache": True}
        reply = self._call(
            "POST", "/update_weights_from_disk", self.timeouts.load_seconds, body, control=True
        )
        if reply.status != 200 or _object(reply).get("success") is not True:
            raise EngineFault(
                f"the engine did not load {label} (HTTP {reply.status})", reply.text[:REPLY_CHARACTERS]
            )
        self._check_content(image)

    def _check_content(self, image: Path) -> None:
        """A stated success may be a load in part: compare some tensors' first rows with the image's."""
        for name, entry in sample_names(image).items():
            body = {"name": name, "truncate_size": ROWS}
            reply = self._call(
                "POST", "/get_weights_by_name", self.timeouts.control_seconds, body, control=True
            )
            if reply.status == 200 and is_other(reply.json(), first_rows(entry)):
                raise EngineFault(f"the engine loaded in part: {name} is not what the image holds")

    def flush(self, deadline_seconds: float) -> None:
        """Ask /flush_cache (without its own timeout, which refuses retracted requests) until it agrees."""
        deadline = time.monotonic() + deadline_seconds
        backoff, tries = _FIRST_BACKOFF_SECONDS, 0
        while True:
            left = max(deadline - time.monotonic(), 0.001)
            reply = self._call("POST", "/flush_cache", min(left, self.timeouts.control_seconds), control=True)
            tries += 1
            if reply.status == 200:
                return
            if reply.status != 400 or time.monotonic() + backoff >= deadline:
                raise EngineFault(
                    f"the engine refused to flush its cache {tries} times (HTTP {reply.status})",
                    reply.text[:REPLY_CHARACTERS],
                )
            self._wake.wait(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def prove(self, label: str) -> Proof:
        """Compare `label` with /model_info and with a fresh, uncached token of a fixed prompt."""
        info = _object(self._ok("GET", "/model_info", self.timeouts.status_seconds))
        if info.get("weight_version") != label:
            raise EngineFault(f"the engine says {info.get('weight_version')!r}, not {label!r}", _text(info))
        answer = self._token(self._canary())
        meta = answer["meta_info"]
        if meta.get("weight_version") != label:
            raise EngineFault(
                f"a fresh token carries {meta.get('weight_version')!r}, not {label!r}", _text(answer)
            )
        if meta.get("cached_tokens") != 0:
            raise EngineFault(
                f"the prefix cache was not dropped: {meta.get('cached_tokens')} tokens", _text(answer)
            )
        return Proof(label=label, token=int(answer["output_ids"][0]), cached_tokens=0)

    def close(self) -> None:
        """Release connections."""
        self._http.close()

    def _call(
        self,
        method: str,
        path: str,
        seconds: float,
        body: dict[str, Any] | None = None,
        *,
        control: bool = False,
    ) -> Reply:
        return self._http.call(method, path, seconds, body, control=control)

    def _ok(
        self,
        method: str,
        path: str,
        seconds: float,
        body: dict[str, Any] | None = None,
        *,
        control: bool = False,
    ) -> Reply:
        reply = self._call(method, path, seconds, body, control=control)
        if reply.status != 200:
            raise EngineFault(f"{path}: HTTP {reply.status}", reply.text[:REPLY_CHARACTERS])
        return reply

    def _token(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        }
        reply = self._ok("POST", "/generate", self.timeouts.token_seconds, body)
        answer = _object(reply)
        meta = answer.get("meta_info")
        if not isinstance(meta, dict) or not answer.get("output_ids"):
            raise EngineFault("the engine generated no token", reply.text[:REPLY_CHARACTERS])
        return answer

    def _server_info(self, seconds: float) -> dict[str, Any]:
        reply = self._call("GET", "/server_info", seconds)
        if reply.status != 200:
            raise EngineFault(f"/server_info: HTTP {reply.status}")  # its text may hold keys: not kept
        try:
            info = json.loads(reply.text)
        except ValueError:
            info = None
        if not isinstance(info, dict):
            raise EngineFault("/server_info: no JSON object")
        return info

    def _start_id(self, deadline: float) -> str:
        """A digest of what is drawn or measured anew at each start: random seed and start-up times."""
        try:
            info = self._server_info(_left(deadline))
        except (Unavailable, EngineFault):
            return ""
        drawn = json.dumps([info.get("random_seed"), info.get("startup_time")], sort_keys=True)
        return hashlib.sha256(drawn.encode()).hexdigest()[:16]

    def _paused(self, deadline: float) -> bool | None:
        try:
            status = self._call("GET", "/ready", _left(deadline)).status
        except (Unavailable, EngineFault):
            return None
        return {200: False, 503: True}.get(status)

    def _requests_running(self, deadline: float) -> int | None:
        try:
            loads = _object(self._ok("GET", "/v1/loads", _left(deadline)))["loads"]
            return sum(int(load["num_running_reqs"]) for load in loads)
        except (Unavailable, EngineFault, KeyError, TypeError, ValueError):
            return None

    def _model(self) -> Path:
        if self._model_path is None:
            self._model_path = Path(
                str(self._server_info(self.timeouts.status_seconds).get("model_path", ""))
            )
        if not self._model_path.is_dir():
            raise ConfigError(f"the served model {self._model_path} is no directory here; give model_path")
        return self._model_path

    def _canary(self) -> list[int]:
        """The last ids of the vocabulary, backwards: no prompt of a user begins like this."""
        vocab_size = int(read_config(self._model()).get("vocab_size", 0))
        if vocab_size < 1:
            raise ConfigError(f"{self._model()}: config.json has no vocab_size")
        return [(vocab_size - 1 - i) % vocab_size for i in range(_CANARY_TOKENS)]


def _object(reply: Reply) -> dict[str, Any]:
    value = reply.json()
    if not isinstance(value, dict):
        raise EngineFault("the engine's answer is no JSON object", reply.text[:REPLY_CHARACTERS])
    return value


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value)[:REPLY_CHARACTERS]


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.01)
