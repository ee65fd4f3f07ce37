"""How a failed call to etcd becomes one of our errors."""

from __future__ import annotations

import re

import grpc

from ..engine.errors import (
    AuthFailed,
    Compacted,
    ConfigError,
    LeaseLost,
    NoSpace,
    SlackwaterError,
    StoreError,
    StoreRewound,
    Unavailable,
)

__all__ = ["ForkedClient", "is_stale_token", "translate", "refused_watch"]

_Code = grpc.StatusCode
# Substrings of etcd's own texts, tried in order; they are the same in 3.4, 3.5 and 3.6.
_TEXTS: tuple[tuple[str, type[SlackwaterError]], ...] = (
    ("database space exceeded", NoSpace),
    ("required revision has been compacted", Compacted),
    ("required revision is a future revision", StoreRewound),
    ("requested lease not found", LeaseLost),
    ("permission denied", AuthFailed),
    ("invalid auth token", AuthFailed),
    ("revision of auth store is old", AuthFailed),
    ("authentication failed", AuthFailed),
    ("user name is empty", AuthFailed),
    ("too many requests", Unavailable),
    ("cluster ID mismatch", StoreRewound),
)
_DEFINITE = {
    _Code.INVALID_ARGUMENT: StoreError,
    _Code.FAILED_PRECONDITION: StoreError,
    _Code.NOT_FOUND: StoreError,
    _Code.ALREADY_EXISTS: StoreError,
    _Code.OUT_OF_RANGE: StoreError,
    _Code.RESOURCE_EXHAUSTED: StoreError,
    _Code.UNIMPLEMENTED: StoreError,
    _Code.DATA_LOSS: StoreError,
    _Code.UNAUTHENTICATED: AuthFailed,
    _Code.PERMISSION_DENIED: AuthFailed,
}


class ForkedClient(ConfigError):
    """The store was made in this process's parent: gRPC does not survive a fork. Use the start method
    `spawn`.
    """


def is_stale_token(error: grpc.RpcError) -> bool:
    """Whether the server refused the token itself (not the permission): nothing was done, ask for a new
    one.
    """
    text = error.details() or ""
    return (
        "invalid auth token" in text
        or "revision of auth store is old" in text
        or "user name is empty" in text
    )


def translate(error: grpc.RpcError, what: str) -> SlackwaterError:
    """Return our error for `error`; `what` says which call on which endpoints.

    Anything that is not known to be a definite refusal is `Unavailable`: it may have been applied.
    """
    code, text = error.code(), error.details() or ""
    message = f"{what}: {text or code}"
    for part, kind in _TEXTS:
        if part in text:
            return kind(message)
    kind = _DEFINITE.get(code, Unavailable)
    if kind is Unavailable and code is _Code.DEADLINE_EXCEEDED:
        message = f"{what}: no answer in time"
    return kind(message)


def refused_watch(reason: str, compact_revision: int, what: str) -> SlackwaterError:
    """Return our error for a watch that the server cancelled."""
    if compact_revision > 0 or "compacted" in reason:
        return Compacted(f"{what}: revision {compact_revision} has been compacted", compact_revision)
    if re.search("permission|auth|user name", reason, re.IGNORECASE):
        return AuthFailed(f"{what}: {reason}")
    return Unavailable(f"{what}: cancelled by the server: {reason or 'no reason given'}")
