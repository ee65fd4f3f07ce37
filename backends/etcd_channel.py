"""One gRPC channel to all members of an etcd cluster: addresses, options, TLS, the auth token, calls
with deadlines.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from ..engine.errors import AuthFailed, ConfigError, SlackwaterError, Unavailable
from .etcd_address import is_ip, parse_endpoints, target_of
from .etcd_errors import ForkedClient, is_stale_token, translate
from .etcd_stubs import check_stub_owner, rpc

__all__ = ["EtcdChannel"]

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.keepalive_time_ms", 10_000),  # pings more often than every 5 s earn a GOAWAY
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # without it a black hole is noticed after 68 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # the default of 120 s lets every lease die after an outage
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),  # a write is sent once
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
)
_RETRY_PAUSE_SECONDS = 0.05


def _read(path: str | Path | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"etcd {what} {path} cannot be read: {error.strerror}") from error


class EtcdChannel:
    """Calls to a cluster with a deadline each, the token of the user attached, and errors in our tree.

    Nothing is opened before the first call. Thread-safe. A forked child of its maker is refused.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        call_timeout_seconds: float = 5.0,
    ) -> None:
        check_stub_owner()
        self.addresses = parse_endpoints(endpoints)
        if (user is None) != (password is None):
            raise ConfigError("etcd user and password go together")
        if (cert is None) != (key is None):
            raise ConfigError("etcd client certificate and key go together")
        if ca is not None and not self.addresses[0].tls:
            raise ConfigError("etcd: a CA is given, but the endpoints are not https://")
        if call_timeout_seconds <= 0:
            raise ConfigError(f"etcd call timeout must be above 0 s, not {call_timeout_seconds:g}")
        self.call_timeout_seconds = call_timeout_seconds
        self._user, self._password = user, password
        self._ca, self._cert, self._key = ca, cert, key
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._auth_lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._token = ""
        self._tokenless = user is None
        self._closed = False
        self._pause = threading.Event()

    def __str__(self) -> str:
        return f"etcd at {', '.join(map(str, self.addresses))}"

    def check_process(self) -> None:
        """Raise `ForkedClient` in a forked child of the process that made this."""
        if os.getpid() != self._pid:
            raise ForkedClient(
                f"{self}: the store was made in process {self._pid} and is used in its fork {os.getpid()}; "
                "use the start method spawn"
            )

    def channel(self) -> grpc.Channel:
        """The open channel; `Unavailable` after `close`."""
        self.check_process()
        with self._lock:
            if self._closed:
                raise Unavailable(f"{self}: the store is closed")
            if self._channel is None:
                self._channel = self._open()
            return self._channel

    def _open(self) -> grpc.Channel:
        target, options = target_of(self.addresses), list(_OPTIONS)
        if not self.addresses[0].tls:
            return grpc.insecure_channel(target, options=options)
        if len(self.addresses) > 1 or is_ip(self.addresses[0].host):
            # One target has one name, whatever the number of members behind it.
            options.append(("grpc.ssl_target_name_override", self.addresses[0].host))
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(self._ca, "CA"),
            private_key=_read(self._key, "client key"),
            certificate_chain=_read(self._cert, "client certificate"),
        )
        return grpc.secure_channel(target, credentials, options=options)

    # -- calls ---------------------------------------------------------------------------------------------

    def write(self, service: Any, method: str, request: Any) -> Any:
        """Send one call once, within the call timeout (again only when its token was refused, so
        unapplied).
        """
        deadline = time.monotonic() + self.call_timeout_seconds
        return self._attempt(service, method, request, deadline)

    def read(self, service: Any, method: str, request: Any) -> Any:
        """As `write`, for calls that change nothing: tried again on other members until the call timeout."""
        deadline = time.monotonic() + self.call_timeout_seconds
        share = self.call_timeout_seconds / (3 if len(self.addresses) > 1 else 1)
        while True:
            now = time.monotonic()
            try:
                return self._attempt(service, method, request, min(deadline, now + share))
            except Unavailable:
                if self._closed or time.monotonic() + _RETRY_PAUSE_SECONDS >= deadline:
                    raise
            self._pause.wait(_RETRY_PAUSE_SECONDS)

    def _attempt(self, service: Any, method: str, request: Any, deadline: float) -> Any:
        for last in (False, True):
            used = self.token(deadline)
            call = getattr(service(self.channel()), method)
            timeout = max(0.001, deadline - time.monotonic())
            try:
                return call(request, timeout=timeout, wait_for_ready=True, metadata=self.metadata(used))
            except grpc.RpcError as error:
                if last or self._tokenless or not is_stale_token(error):
                    raise self.translated(error, method) from error
                self.forget_token(used)
            except ValueError as error:  # grpc's answer to a call on a channel that another thread closed
                raise Unavailable(f"{self}: the store is closed") from error
        raise AuthFailed(f"{self}: {method}: the token was refused twice")

    def translated(self, error: grpc.RpcError, method: str) -> SlackwaterError:
        """Our error for a failed call, with the endpoints named."""
        return translate(error, f"{self}: {method}")

    def open_stream(self, service: Any, method: str, requests: Iterator[Any]) -> Any:
        """Open a bidirectional stream that waits for a member; its caller bounds it in time and cancels
        it.
        """
        used = self.token(time.monotonic() + self.call_timeout_seconds)
        open_call: Callable[..., Any] = getattr(service(self.channel()), method)
        return open_call(requests, wait_for_ready=True, metadata=self.metadata(used))

    # -- the token -----------------------------------------------------------------------------------------

    @property
    def has_user(self) -> bool:
        """Whether calls carry a user's token."""
        return not self._tokenless

    @staticmethod
    def metadata(token: str) -> tuple[tuple[str, str], ...]:
        """What carries the token; works over plain http too."""
        return (("token", token),) if token else ()

    def token(self, deadline: float) -> str:
        """The user's token, fetched when there is none."""
        if self._tokenless:
            return ""
        with self._auth_lock:
            if not self._token:
                self._token = self._authenticate(deadline)
            return self._token

    def forget_token(self, used: str = "") -> None:
        """Drop the token that was refused, unless another thread has fetched a new one (no `used`: in
        any case).
        """
        with self._auth_lock:
            if not used or self._token == used:
                self._token = ""

    def _authenticate(self, deadline: float) -> str:
        request = rpc.AuthenticateRequest(name=self._user, password=self._password)
        timeout = max(0.001, deadline - time.monotonic())
        try:
            reply = rpc.AuthStub(self.channel()).Authenticate(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                self._tokenless = True
                return ""
            raise translate(error, f"{self}: user {self._user}") from error
        return str(reply.token)

    def close(self) -> None:
        """Close the channel; idempotent. In a forked child nothing is touched."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
        self._pause.set()
        if channel is not None:
            channel.close()
