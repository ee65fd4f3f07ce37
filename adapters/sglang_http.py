"""Calls to one SGLang server: a total deadline for each, the right key, and errors of our tree.

Keys are sent and never shown: they are struck out of every reply, because /server_info repeats them.
"""

from __future__ import annotations

import errno
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from ..engine.engineport import EngineGone
from ..engine.errors import EngineFault, Unavailable

__all__ = ["Reply", "SGLangHttp"]

REPLY_CHARACTERS = 2000
_MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """Status code and text of an answer."""

    status: int
    text: str

    def json(self) -> Any:
        """The body as JSON. Raises `EngineFault` when it is none."""
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise EngineFault("the engine's answer is no JSON", self.text[:REPLY_CHARACTERS]) from error


class SGLangHttp:
    """A client without kept connections: a reused one that the server had closed would look like a death."""

    def __init__(self, url: str, api_key: str | None = None, admin_api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._admin_api_key = admin_api_key
        self._client = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)

    def call(
        self,
        method: str,
        path: str,
        timeout_seconds: float,
        body: dict[str, Any] | None = None,
        *,
        control: bool = False,
    ) -> Reply:
        """Send one request and read its whole answer within `timeout_seconds`.

        `control` calls carry the admin key where there is one. Raises `EngineGone` when the connection is
        refused, `Unavailable` on silence or a connection that broke. Every status code is a `Reply`.
        """
        deadline = time.monotonic() + timeout_seconds
        key = self._admin_api_key if control and self._admin_api_key else self._api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        where = f"{method} {self.url}{path}"
        try:
            with self._client.stream(
                method, self.url + path, json=body, headers=headers, timeout=timeout_seconds
            ) as response:
                data = _read(response, deadline, where)
        except httpx.ConnectError as error:
            if _refused(error):
                raise EngineGone(f"{where}: connection refused") from error
            raise Unavailable(f"{where}: {error}") from error
        except httpx.TimeoutException as error:
            raise Unavailable(f"{where}: no answer within {timeout_seconds:g} s") from error
        except httpx.TransportError as error:
            raise Unavailable(f"{where}: the connection broke ({error})") from error
        return Reply(response.status_code, self._without_keys(data.decode(errors="replace")))

    def close(self) -> None:
        """Release connections."""
        self._client.close()

    def _without_keys(self, text: str) -> str:
        for key in (self._api_key, self._admin_api_key):
            if key:
                text = text.replace(key, "***")
        return text


def _read(response: httpx.Response, deadline: float, where: str) -> bytes:
    data = bytearray()
    for piece in response.iter_bytes():
        data += piece
        if time.monotonic() > deadline or len(data) > _MAX_BODY_BYTES:
            raise Unavailable(f"{where}: the answer did not end in time, or was too long")
    return bytes(data)


def _refused(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.ECONNREFUSED:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
