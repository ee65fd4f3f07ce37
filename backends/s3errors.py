"""botocore's exceptions as errors of our tree, in one line that names the bucket and the cause."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from botocore import exceptions as boto

from ..engine.errors import (
    AuthFailed,
    Conflict,
    CorruptCheckpoint,
    NoSpace,
    NotFound,
    SlackwaterError,
    StoreError,
    Unavailable,
)

__all__ = ["code_of", "named_errors", "translate"]

_AUTH = {
    "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
    "TokenRefreshRequired", "AuthorizationHeaderMalformed", "403", "401",
}  # fmt: skip
_MISSING = {"NoSuchKey", "NoSuchBucket", "NoSuchUpload", "404"}
_FULL = {"QuotaExceeded", "EntityTooLarge", "XMinioStorageFull", "InsufficientStorage"}
_BAD_BYTES = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"}
_TRANSIENT = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "TooManyRequests", "500", "502", "503", "504", "429",
}  # fmt: skip


def code_of(error: BaseException) -> str:
    """S3's error code, or "" for an exception that carries none."""
    if isinstance(error, boto.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


def translate(error: Exception, what: str) -> SlackwaterError:
    """The error of our tree for one of botocore's; `what` names the object and the store."""
    code = code_of(error)
    if code in _AUTH:
        return AuthFailed(f"{what}: the store refuses the credentials or this access ({code})")
    if code == "RequestTimeTooSkewed":
        return AuthFailed(
            f"{what}: this host's clock differs too much from the store's (RequestTimeTooSkewed)"
        )
    if code == "NoSuchBucket":
        return NotFound(f"{what}: the bucket does not exist")
    if code in _MISSING:
        return NotFound(f"{what}: missing, or not permitted to be seen ({code})")
    if code in _FULL:
        return NoSpace(f"{what}: the store is full or over its quota ({code})")
    if code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
        return Conflict(f"{what}: it exists already ({code})")
    if code in _BAD_BYTES:
        return CorruptCheckpoint(f"{what}: the store received other bytes than were sent ({code})", what)
    if code in _TRANSIENT:
        return Unavailable(f"{what}: the store is not able to answer now ({code})")
    if isinstance(
        error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError
    ):
        return AuthFailed(f"{what}: no complete credentials were found: {error}")
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return Unavailable(f"{what}: the store cannot be reached")
    if isinstance(error, boto.HTTPClientError | boto.ConnectionError):
        return Unavailable(f"{what}: the connection broke: {type(error).__name__}")
    if code:
        return StoreError(f"{what}: the store answered {code}")
    return StoreError(f"{what}: {error}")


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn botocore's exceptions inside the block into ours."""
    try:
        yield
    except (boto.BotoCoreError, boto.ClientError) as error:
        raise translate(error, what) from error
