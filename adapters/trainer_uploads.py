"""Uploads committed checkpoints of this host to the object store, one after the other, in a thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import structlog

from ..engine.errors import Fenced, SlackwaterError, StoreError
from ..engine.filetier import FileTier
from ..engine.manifest import COMMITTED_NAME
from ..engine.model import Checkpoint, Upload
from ..engine.trainerrole import TrainerRole
from ..engine.upload import UploadStore, publish_committed, upload_checkpoint

__all__ = ["Uploader"]

_TRIES = 6
_FIRST_WAIT_S = 0.5
_REPORT_S = 1.0


class Uploader:
    """`submit` a committed checkpoint; `drain` waits for all of them. `error` is why the newest is not durable."""

    def __init__(
        self, role: TrainerRole, tier: FileTier, objects: UploadStore, remote: Callable[[str], str]
    ) -> None:
        self._role, self._tier, self._objects, self._remote = role, tier, objects, remote
        self._jobs: queue.SimpleQueue[Checkpoint | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._idle = threading.Event()
        self._idle.set()
        self._stopping = threading.Event()
        self.error: SlackwaterError | None = None
        self.crashed: BaseException | None = None
        self.bytes_done = self.bytes_total = 0
        self._log = structlog.get_logger().bind(participant="trainer")
        self._thread = threading.Thread(target=self._run, name="slackwater-upload", daemon=True)
        self._thread.start()

    def submit(self, record: Checkpoint) -> None:
        """Upload this checkpoint when its turn comes; one that is under way already is not taken twice."""
        with self._lock:
            if record.checkpoint in self._open:
                return
            self._open.add(record.checkpoint)
            self._idle.clear()
        self._jobs.put(record)

    def drain(self, timeout_seconds: float) -> bool:
        """Wait for all uploads; False when the time ran out."""
        return self._idle.wait(timeout_seconds)

    def close(self) -> None:
        """Stop after the transfer that is under way; waits at most a second."""
        self._stopping.set()
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while (record := self._jobs.get()) is not None and not self._stopping.is_set():
            try:
                self.error = self._upload(record)
            except BaseException as error:  # noqa: BLE001  # kept for the training thread, which raises it
                self.crashed = error
                self._log.error("the uploader failed", error=repr(error))
            finally:
                with self._lock:
                    self._open.discard(record.checkpoint)
                    if not self._open:
                        self._idle.set()

    def _upload(self, record: Checkpoint) -> SlackwaterError | None:
        wait = _FIRST_WAIT_S
        error: SlackwaterError | None = None
        for _ in range(_TRIES):
            try:
                self._once(record)
                return None
            except (SlackwaterError, OSError) as found:
                error = found if isinstance(found, SlackwaterError) else StoreError(str(found))
                self._log.warning("upload failed", checkpoint=record.checkpoint, error=str(found))
            if self._stopping.wait(wait):
                break
            wait *= 2
        self._tell(record, "failed", error=str(error)[:1000])
        return error

    def _once(self, record: Checkpoint) -> None:
        last = 0.0
        self._tell(record, "uploading", bytes_total=record.size_bytes)

        def progress(sent: int, total: int) -> None:
            nonlocal last
            self.bytes_done, self.bytes_total = sent, total
            if time.monotonic() - last >= _REPORT_S:
                last = time.monotonic()
                self._log.info("uploading", checkpoint=record.checkpoint, bytes_done=sent, bytes_total=total)
                self._tell(record, "uploading", bytes_done=sent, bytes_total=total)

        directory = self._tier.path(record.path)
        upload_checkpoint(self._objects, directory, record.path, record.manifest_digest, progress)
        publish_committed(self._objects, record.path, self._tier.read_json(f"{record.path}/{COMMITTED_NAME}"))
        size = record.size_bytes
        self._tell(record, "done", bytes_done=size, bytes_total=size, remote=self._remote(record.path))
        self._log.info("durable", checkpoint=record.checkpoint, bytes_total=size)

    def _tell(self, record: Checkpoint, state: str, **fields: object) -> None:
        """Write progress; a store that is away for a moment does not stop an upload, but its end must be told."""
        incarnation = self._role.membership.incarnation
        upload = Upload(checkpoint=record.checkpoint, incarnation=incarnation, state=state, **fields)  # type: ignore[arg-type]
        try:
            written = self._role.upload(upload)
        except SlackwaterError:
            if state == "done":
                raise
            return
        if state == "done" and not written:
            raise Fenced(
                f"checkpoint {record.checkpoint} is uploaded, but a recovery came before that was told"
            )
