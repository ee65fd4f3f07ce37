"""The experience buffer as its own HTTP service, and the client with the same methods.

Several rollout drivers append to one buffer that outlives the trainer. Every request is a POST of
MessagePack with
a bearer token and the caller's (timeline, incarnation); a named error travels by its name and comes back
as the
same exception. Paths in `cut` and `restore` are paths on the service's machine.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Self, TypeVar

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..engine import errors
from ..engine.experience import ExperienceBuffer
from ..engine.samples import (
    BufferPart,
    Caller,
    Dispatch,
    FreshnessReport,
    LandReport,
    LeasedSample,
    Sample,
    SampleId,
)

__all__ = ["BufferServer", "RemoteExperienceBuffer", "buffer_app"]

T = TypeVar("T")

LONGEST_WAIT_SECONDS = 20.0
STATUS = {
    "ConfigError": 400,
    "StateMismatch": 400,
    "NotFound": 404,
    "Conflict": 409,
    "Fenced": 403,
    "CorruptCheckpoint": 422,
    "NoSpace": 507,
    "Unavailable": 503,
}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of any method; each uses the fields that it needs."""

    caller: Caller = Caller(timeline=0)
    count: int = 0
    samples: tuple[Sample, ...] = ()
    ids: tuple[SampleId, ...] = ()
    reason: str = ""
    step: int = 0
    key: str = ""
    prefetch: bool = False
    timeout_seconds: float = 0.0
    directory: str = ""
    part: BufferPart | None = None
    step_map: dict[int, int] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A named error on the wire."""

    error: str
    message: str


def _methods(buffer: ExperienceBuffer) -> dict[str, Callable[[Call], Any]]:
    def fenced(action: Callable[[Call], Any]) -> Callable[[Call], Any]:
        def checked(call: Call) -> Any:
            buffer.check(call.caller)
            return action(call)

        return checked

    def lease(call: Call) -> list[LeasedSample]:
        wait = min(call.timeout_seconds, LONGEST_WAIT_SECONDS)
        return buffer.lease(
            call.caller, call.step, call.count, key=call.key, prefetch=call.prefetch, timeout_seconds=wait
        )

    return {
        "fence": lambda call: buffer.fence(call.caller.timeline, call.caller.incarnation),
        "next_prompts": lambda call: buffer.next_prompts(call.caller, call.count),
        "land": lambda call: buffer.land(call.caller, call.samples),
        "requeue": lambda call: buffer.requeue(call.caller, call.ids, call.reason),
        "drop": lambda call: buffer.drop(call.caller, call.ids, call.reason),
        "lease": lease,
        "unlease": lambda call: buffer.unlease(call.caller, call.step),
        "trained": lambda call: buffer.trained(call.caller, call.step),
        "step_done": lambda call: buffer.step_done(call.caller, call.step),
        "cut": fenced(lambda call: buffer.cut(call.step, Path(call.directory))),
        "committed": fenced(lambda call: buffer.committed(call.step)),
        "restore": fenced(lambda call: buffer.restore(Path(call.directory), call.part, call.caller.timeline)),
        "apply_freshness": fenced(lambda call: buffer.apply_freshness(call.step_map, call.step)),
        "statistics": lambda _: buffer.statistics(),
        "version": lambda _: buffer.version,
    }


def buffer_app(buffer: ExperienceBuffer, *, token: str, max_body_bytes: int = 64 << 20) -> Starlette:
    """The ASGI application over an open buffer. Bodies above the bound are refused with 413 before being
    kept."""
    if not token:
        raise errors.ConfigError("the buffer service needs a token: without one anybody could write samples")
    methods = _methods(buffer)
    expected = f"Bearer {token}".encode()

    async def answer(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return _failure(401, "AuthFailed", "wrong or missing token")
        method = methods.get(request.path_params["method"])
        if method is None:
            return _failure(404, "NotFound", f"no method {request.path_params['method']}")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > max_body_bytes:
                return _failure(413, "ConfigError", f"the body is above {max_body_bytes} bytes")
        try:
            call = msgspec.msgpack.decode(body, type=Call)
            result = await run_in_threadpool(method, call)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _failure(400, "ConfigError", f"unreadable request: {error}")
        except errors.SlackwaterError as error:
            name = type(error).__name__
            return _failure(STATUS.get(name, 500), name, str(error))
        return Response(msgspec.msgpack.encode(result), media_type="application/msgpack")

    return Starlette(routes=[Route("/v1/{method}", answer, methods=["POST"])])


def _failure(status: int, name: str, message: str) -> Response:
    body = msgspec.msgpack.encode(Failure(error=name, message=message))
    return Response(body, status_code=status, media_type="application/msgpack")


class BufferServer:
    """Serves a buffer from a thread of this process; `close` stops it and leaves the buffer open."""

    def __init__(
        self,
        buffer: ExperienceBuffer,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = 64 << 20,
    ) -> None:
        app = buffer_app(buffer, token=token, max_body_bytes=max_body_bytes)
        config = uvicorn.Config(app, host=host, port=port, log_config=None, access_log=False, lifespan="off")
        self._server = uvicorn.Server(config)
        self._host = host
        self._port = port
        self._thread = threading.Thread(target=self._run, name="buffer-service", daemon=True)

    def start(self, timeout_seconds: float = 10.0) -> Self:
        """Listen; returns when connections are accepted. `Unavailable` when that takes too long or the
        port is taken."""
        self._thread.start()
        waiting = threading.Event()
        for _ in range(int(timeout_seconds * 50)):
            if self._server.started or not self._thread.is_alive():
                break
            waiting.wait(0.02)
        if not self._server.started:
            raise errors.Unavailable(f"the buffer service did not come up on {self._host}:{self._port}")
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        """Where clients find it, with the port really bound."""
        return f"http://{self._host}:{self._port}"

    def close(self, timeout_seconds: float = 10.0) -> None:
        """Stop accepting, finish what runs, end the thread; idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._server.run()
        except SystemExit:  # uvicorn exits its process when it cannot bind; here only the thread ends
            return


class RemoteExperienceBuffer:
    """The buffer's methods over HTTP; thread-safe. A lost reply is `Unavailable`: every method may be
    repeated.

    `lease` repeats itself within its timeout and needs a `key` to be repeatable after an `Unavailable`.
    The last
    `fence` names the (timeline, incarnation) that `cut`, `committed`, `restore` and `apply_freshness` carry.
    """

    def __init__(self, url: str, *, token: str, timeout_seconds: float = 60.0) -> None:
        headers = {"authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=timeout_seconds, trust_env=False)
        self._caller = Caller(timeline=0)

    @property
    def version(self) -> int:
        """The log's position."""
        return self._ask("version", Call(), int)

    def fence(self, timeline: int, incarnation: str = "") -> None:
        """See `Buffer.fence`."""
        caller = Caller(timeline=timeline, incarnation=incarnation)
        self._ask("fence", Call(caller=caller), NoneType)
        self._caller = caller

    def next_prompts(self, caller: Caller, count: int) -> list[Dispatch]:
        """See `ExperienceBuffer.next_prompts`. Prompts of a lost reply come again only through `requeue`."""
        return self._ask("next_prompts", Call(caller=caller, count=count), list[Dispatch])

    def land(self, caller: Caller, samples: Sequence[Sample]) -> LandReport:
        """See `ExperienceBuffer.land`; idempotent."""
        return self._ask("land", Call(caller=caller, samples=tuple(samples)), LandReport)

    def requeue(self, caller: Caller, ids: Sequence[SampleId], reason: str = "lost") -> int:
        """See `ExperienceBuffer.requeue`."""
        return self._ask("requeue", Call(caller=caller, ids=tuple(ids), reason=reason), int)

    def drop(self, caller: Caller, ids: Sequence[SampleId], reason: str) -> int:
        """See `ExperienceBuffer.drop`."""
        return self._ask("drop", Call(caller=caller, ids=tuple(ids), reason=reason), int)

    def lease(
        self,
        caller: Caller,
        step: int,
        count: int,
        *,
        key: str = "",
        prefetch: bool = False,
        timeout_seconds: float = 0.0,
    ) -> list[LeasedSample]:
        """See `ExperienceBuffer.lease`; one request waits up to 20 s, longer waits are several requests."""
        left = timeout_seconds
        while True:
            wait = min(left, LONGEST_WAIT_SECONDS)
            call = Call(
                caller=caller, step=step, count=count, key=key, prefetch=prefetch, timeout_seconds=wait
            )
            leased = self._ask("lease", call, list[LeasedSample])
            left -= wait
            if leased or left <= 0:
                return leased

    def unlease(self, caller: Caller, step: int) -> int:
        """See `ExperienceBuffer.unlease`."""
        return self._ask("unlease", Call(caller=caller, step=step), int)

    def trained(self, caller: Caller, step: int) -> int:
        """See `ExperienceBuffer.trained`."""
        return self._ask("trained", Call(caller=caller, step=step), int)

    def step_done(self, caller: Caller, step: int) -> int:
        """See `ExperienceBuffer.step_done`."""
        return self._ask("step_done", Call(caller=caller, step=step), int)

    def cut(self, step: int, directory: Path) -> BufferPart:
        """See `Buffer.cut`; the directory is the service's."""
        return self._ask("cut", Call(caller=self._caller, step=step, directory=str(directory)), BufferPart)

    def committed(self, step: int) -> None:
        """See `Buffer.committed`."""
        self._ask("committed", Call(caller=self._caller, step=step), NoneType)

    def restore(self, directory: Path, part: BufferPart | None, timeline: int) -> None:
        """See `Buffer.restore`; the directory is the service's."""
        caller = Caller(timeline=timeline, incarnation=self._caller.incarnation)
        self._ask("restore", Call(caller=caller, directory=str(directory), part=part), NoneType)

    def apply_freshness(self, step_map: Mapping[int, int], training_step: int) -> FreshnessReport:
        """See `Buffer.apply_freshness`."""
        call = Call(caller=self._caller, step_map=dict(step_map), step=training_step)
        return self._ask("apply_freshness", call, FreshnessReport)

    def statistics(self) -> dict[str, Any]:
        """See `Buffer.statistics`."""
        return self._ask("statistics", Call(), dict[str, Any])

    def close(self) -> None:
        """Close the connections; the service and its buffer live on."""
        self._client.close()

    def _ask(self, method: str, call: Call, kind: type[T]) -> T:
        try:
            reply = self._client.post(f"/v1/{method}", content=msgspec.msgpack.encode(call))
        except httpx.HTTPError as error:
            raise errors.Unavailable(f"buffer service, {method}: {error!r}") from error
        if reply.status_code == 200:
            return msgspec.msgpack.decode(reply.content, type=kind)
        raise _named_error(method, reply)


def _named_error(method: str, reply: httpx.Response) -> errors.SlackwaterError:
    try:
        failure = msgspec.msgpack.decode(reply.content, type=Failure)
    except msgspec.DecodeError:
        return errors.Unavailable(f"buffer service, {method}: status {reply.status_code}")
    kind = getattr(errors, failure.error, errors.SlackwaterError)
    error: errors.SlackwaterError = kind(failure.message)
    return error
