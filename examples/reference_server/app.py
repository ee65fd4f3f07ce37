"""The endpoints, with the paths, bodies, status codes and answers of SGLang 0.5.23."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from tokenizers import Tokenizer

from .faults import Faults
from .generate import BadRequest, answer, parse_requests
from .model import LoadDied, LoadRefused, TinyLlama
from .scheduler import Request, Scheduler

__all__ = ["VERSION", "make_app"]

VERSION = "0.5.23"
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
DIED_EXIT_CODE = 9
HEALTH_TIMEOUT_SECONDS = 20.0


def make_app(model_path: Path, weight_version: str = "default") -> Starlette:
    """Load the model and return the application; one scheduler thread is started."""
    return _Server(model_path, weight_version).app()


class _Server:
    def __init__(self, model_path: Path, weight_version: str) -> None:
        self.faults = Faults()
        self.base_path = str(model_path)
        self.tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        model = TinyLlama(model_path)
        self.eos = model.config.get("eos_token_id")
        self.scheduler = Scheduler(model, weight_version, self.base_path, self.faults)
        self.start_label = weight_version
        self.random_seed = random.SystemRandom().randrange(1 << 30)
        self.session_open = False

    def app(self) -> Starlette:
        get, post, both = ["GET"], ["POST"], ["GET", "POST"]
        table = [
            ("/generate", self.generate, post),
            ("/model_info", self.model_info, get),
            ("/server_info", self.server_info, get),
            ("/v1/loads", self.loads, get),
            ("/health", self.health, get),
            ("/health_generate", self.health, get),
            ("/ready", self.ready, get),
            ("/ping", self.ping, get),
            ("/pause_generation", self.pause, post),
            ("/continue_generation", self.resume, post),
            ("/flush_cache", self.flush, both),
            ("/abort_request", self.abort, post),
            ("/update_weights_from_disk", self.update, post),
            ("/update_weight_version", self.update_version, post),
            ("/get_weights_by_name", self.weights_by_name, both),
            ("/weights_checker", self.weights_checker, both),
            ("/begin_weight_update", self.begin_update, post),
            ("/end_weight_update", self.end_update, post),
        ]
        routes = [Route(path, self._guarded(call), methods=methods) for path, call, methods in table]
        return Starlette(routes=[*routes, Route("/_fault", self.fault, methods=post)])

    def _guarded(self, call: Any) -> Any:
        async def guarded(request: HttpRequest) -> Response:
            if self.faults.take("silence"):
                await asyncio.Event().wait()
            try:
                return await call(request)  # type: ignore[no-any-return]
            except BadRequest as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)

        return guarded

    async def fault(self, request: HttpRequest) -> Response:
        """Switch a fault on: {"kind": ..., "times": -1, "seconds": 0}."""
        try:
            self.faults.set(**await request.json())
        except (ValueError, TypeError) as error:
            return JSONResponse({"message": str(error)}, 400)
        return JSONResponse({"message": "ok"})

    # -- generation

    async def generate(self, request: HttpRequest) -> Response:
        body = await _json(request)
        single, requests = await self._run(body)
        answers = [answer(r, self.tokenizer, bool(body.get("return_logprob"))) for r in requests]
        return JSONResponse(answers[0] if single else answers)

    async def _run(self, body: dict[str, Any]) -> tuple[bool, list[Request]]:
        loop = asyncio.get_running_loop()
        all_done: asyncio.Future[None] = loop.create_future()
        left = [0]

        def one_done(_request: Request) -> None:
            loop.call_soon_threadsafe(count_down)

        def count_down() -> None:
            left[0] -= 1
            if left[0] == 0 and not all_done.done():
                all_done.set_result(None)

        vocab = self.scheduler.model.shape.vocab
        single, requests = parse_requests(body, self.tokenizer, self.eos, one_done)
        if any(token >= vocab or token < 0 for r in requests for token in r.prompt):
            os._exit(DIED_EXIT_CODE)  # the real scheduler dies of an index error, and the server with it
        left[0] = len(requests)
        for item in requests:
            self.scheduler.submit(item)
        await all_done
        return single, requests

    # -- what the server says about itself

    async def model_info(self, _request: HttpRequest) -> Response:
        config = self.scheduler.model.config
        return JSONResponse(
            {
                "model_path": self.scheduler.path,
                "served_model_name": self.scheduler.path,
                "tokenizer_path": self.base_path,
                "is_generation": True,
                "weight_version": self.scheduler.label,
                "load_format": "auto",
                "model_type": config.get("model_type"),
                "architectures": config.get("architectures"),
            }
        )

    async def server_info(self, _request: HttpRequest) -> Response:
        return JSONResponse(
            {
                "model_path": self.base_path,
                "weight_version": self.start_label,
                "random_seed": self.random_seed,
                "api_key": None,
                "admin_api_key": None,
                "internal_states": [{"weight_version": self.scheduler.label}],
                "version": VERSION,
                "frontend": "reference",
            }
        )

    async def loads(self, _request: HttpRequest) -> Response:
        running, waiting = self.scheduler.counts
        return JSONResponse(
            {"version": VERSION, "loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting}]}
        )

    async def health(self, _request: HttpRequest) -> Response:
        one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            await asyncio.wait_for(self._run(one_token), HEALTH_TIMEOUT_SECONDS)
        except TimeoutError:
            return Response(status_code=503)
        return Response(status_code=200)

    async def ready(self, _request: HttpRequest) -> Response:
        return Response(status_code=503 if self.scheduler.paused else 200)

    async def ping(self, _request: HttpRequest) -> Response:
        return Response(status_code=200)

    # -- control

    async def pause(self, request: HttpRequest) -> Response:
        mode = (await _json(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest("Input should be 'abort', 'retract' or 'in_place'")
        await run_in_threadpool(self.scheduler.pause, mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: HttpRequest) -> Response:
        await _json(request)
        await run_in_threadpool(self.scheduler.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: HttpRequest) -> Response:
        timeout = float(request.query_params.get("timeout", 0.0))
        refused = self.faults.take("refuse_flush")
        keep = self.faults.take("stale_cache")
        if not refused and await run_in_threadpool(self.scheduler.flush, timeout, keep_cache=keep):
            return PlainTextResponse(FLUSHED)
        return PlainTextResponse(
            "Timed out waiting for idle state." if timeout else "Flush cache failed.\n", 400
        )

    async def abort(self, request: HttpRequest) -> Response:
        body = await _json(request)
        rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
        await run_in_threadpool(self.scheduler.abort, rid, everything)
        return Response(status_code=200)

    async def update(self, request: HttpRequest) -> Response:
        body = await _json(request)
        if "model_path" not in body:
            raise BadRequest("Field required: model_path")
        return await run_in_threadpool(self._update, body)

    def _update(self, body: dict[str, Any]) -> Response:
        time.sleep(self.faults.seconds("slow_load"))
        if self.faults.take("unsuccessful_200"):
            return _updated(False, "Failed to update weights on rank 1.", 200)
        if self.faults.take("crash_in_update"):
            os._exit(DIED_EXIT_CODE)
        load_format, label = body.get("load_format"), body.get("weight_version")
        if load_format == "dummy":
            return _updated(False, "Failed to get model loader: DummyModelLoader.", 400)
        if load_format not in (None, "auto", "safetensors"):
            os._exit(DIED_EXIT_CODE)
        if self.faults.take("wrong_version"):
            label = "wrong"
        if body.get("abort_all_requests"):
            self.scheduler.abort("", True)
        flush = bool(body.get("flush_cache", True))
        try:
            flushed = self.scheduler.update(
                body["model_path"],
                label,
                flush=flush,
                only_part=self.faults.take("partial_load"),
                keep_cache=self.faults.take("stale_cache"),
            )
        except LoadRefused as error:
            return _updated(False, str(error), 400)
        except LoadDied:
            os._exit(DIED_EXIT_CODE)
        if not flushed or self.faults.take("updated_but_400"):
            return _updated(False, NOT_FLUSHED, 400)
        said = "" if label is None else f" Weight version updated to {label}."
        return _updated(True, "Succeeded to update model weights." + said, 200)

    async def update_version(self, request: HttpRequest) -> Response:
        body = await _json(request)
        label = body["new_version"]
        if body.get("abort_all_requests", True):
            await run_in_threadpool(self.scheduler.abort, "", True)
        self.scheduler.set_label(label)
        return JSONResponse(
            {"success": True, "message": f"Weight version updated to {label}", "new_version": label}
        )

    async def weights_by_name(self, request: HttpRequest) -> Response:
        body = await _json(request)
        tensor = self.scheduler.model.weights.get(body.get("name", ""))
        if tensor is None:
            raise BadRequest("Get parameter by name failed")
        return JSONResponse(tensor[: body.get("truncate_size", 100)].float().tolist())

    async def weights_checker(self, request: HttpRequest) -> Response:
        body = await _json(request) if request.method == "POST" else dict(request.query_params)
        if body.get("action", "checksum") != "checksum":
            raise BadRequest("only checksum")
        sums = {name: _checksum(tensor) for name, tensor in self.scheduler.model.weights.items()}
        return JSONResponse({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})

    async def begin_update(self, _request: HttpRequest) -> Response:
        if self.session_open:
            message = "a weight-update session is already open; call end_weight_update() first"
            return JSONResponse({"success": False, "message": message}, 400)
        self.session_open = True
        return JSONResponse({"success": True, "message": "Success"})

    async def end_update(self, _request: HttpRequest) -> Response:
        if not self.session_open:
            message = "no weight-update session is open; call begin_weight_update() first"
            return JSONResponse({"success": False, "message": message}, 400)
        self.session_open = False
        return JSONResponse({"success": True, "message": "Success"})


def _updated(success: bool, message: str, status: int) -> Response:
    return JSONResponse({"success": success, "message": message, "num_paused_requests": 0}, status)


def _checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


async def _json(request: HttpRequest) -> dict[str, Any]:
    try:
        body = await request.json()
    except json.JSONDecodeError as error:
        raise BadRequest("Field required: a JSON body") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    return body
