"""A server process that we own: it dies with us, is stopped by its pid, and its log names why it failed."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..engine.errors import ConfigError, Unavailable

__all__ = ["ChildProcess", "PortTaken", "free_ports", "wait_until"]

# A fresh interpreter asks the kernel for SIGKILL at its parent's death, then becomes the server. This needs
# no code between fork and exec, so it is safe in a process with threads. argv: our pid, program, arguments.
_SHIM = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)
_PORTS = range(
    10_240, 22_000
)  # with +10,000 still below the ports that the kernel hands to outgoing connections
_PORT_WORDS = ("address already in use", "Port allocation failed")  # etcd's and weed's
_living: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


class PortTaken(Unavailable):
    """Somebody else took a port between our look and the server's bind; pick others and start again."""


class _Starter:
    """One thread that lives as long as the process and starts every child.

    The kernel sends a child its death signal when the *thread* that started it ends, not only the process.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], queue.SimpleQueue[object]]]
        self._jobs = queue.SimpleQueue()
        self._pid = os.getpid()
        threading.Thread(target=self._run, name="child-starter", daemon=True).start()

    def _run(self) -> None:
        while True:
            start, answer = self._jobs.get()
            try:
                answer.put(start())
            except Exception as error:  # noqa: BLE001  # handed to the caller, who raises it
                answer.put(error)

    def start(self, job: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._jobs.put((job, answer))
        result = answer.get()
        if isinstance(result, subprocess.Popen):
            return result
        raise ConfigError(f"cannot start a server: {result}")

    @property
    def usable(self) -> bool:
        return self._pid == os.getpid()


_starter: _Starter | None = None
_starter_lock = threading.Lock()


def _the_starter() -> _Starter:
    global _starter
    with _starter_lock:
        if _starter is None or not _starter.usable:
            _starter = _Starter()
        return _starter


def free_ports(count: int, *, also_plus: int = 0) -> list[int]:
    """Return `count` loopback ports free at this moment; with `also_plus`, port + also_plus is free too.

    Nothing reserves them: a server that then cannot bind raises `PortTaken`, and its owner picks again.
    """
    chosen: list[int] = []
    while len(chosen) < count:
        port = random.choice(_PORTS)  # noqa: S311  # spreads parallel runs, no secret
        if port not in chosen and all(_is_free(p) for p in {port, port + also_plus}):
            chosen.append(port)
    return chosen


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(
    condition: Callable[[], bool], timeout_seconds: float, what: str, poll_seconds: float = 0.05
) -> None:
    """Block until `condition()` holds; `Unavailable` naming `what` when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            raise Unavailable(f"{what}: not within {timeout_seconds:g} s")
        pause.wait(poll_seconds)


class ChildProcess:
    """One child with its log file. Not restarted by itself; its owner calls `stop` or leaves it to
    interpreter exit.
    """

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.argv = tuple(argv)
        self.log = log
        self._environment = dict(environment) if environment is not None else None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()

    @property
    def owned(self) -> bool:
        """Whether this process started it (a forked copy of its owner did not)."""
        return self._owner_pid == os.getpid()

    @property
    def pid(self) -> int:
        """The pid of the last start (0 before the first)."""
        return self._process.pid if self._process is not None else 0

    def running(self) -> bool:
        """Whether the process exists (a paused one does)."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the program; it is not ready yet when this returns."""
        if self.running():
            return
        shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *self.argv]
        with self.log.open("ab") as out:
            self._process = _the_starter().start(
                lambda: subprocess.Popen(
                    shim,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    process_group=0,  # a Ctrl-C in the terminal reaches us first, and we stop it in order
                )
            )
        _living.add(self)

    def check(self) -> None:
        """Raise when the process has ended: `PortTaken` or `Unavailable` with the end of its log."""
        if self.running():
            return
        tail = self.log.read_text(errors="replace")[-2000:]
        if any(words in tail for words in _PORT_WORDS):
            raise PortTaken(f"{Path(self.argv[0]).name} could not bind its port: {tail[-300:]}")
        code = self._process.returncode if self._process is not None else None
        raise Unavailable(f"{Path(self.argv[0]).name} ended with code {code}: {tail}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; one that has ended is no error."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once (SIGKILL) and wait for its end."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(timeout=30)

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End it with SIGTERM and wait; SIGKILL when it does not end in time. Idempotent."""
        if self._process is None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        _living.discard(self)


@atexit.register
def _stop_all() -> None:
    children = [child for child in _living if child.owned]
    for child in children:
        child.signal(signal.SIGCONT)
        child.signal(signal.SIGTERM)
    for child in children:
        with contextlib.suppress(
            OSError, subprocess.SubprocessError
        ):  # the kernel's death signal gets the rest
            child.stop()
