"""Run one slow command of the set-up and show what it is doing: step.py LABEL COMMAND [ARGUMENT ...].

On a terminal one line is rewritten with the elapsed time and the command's last words; elsewhere a line
is printed when it starts, every 15 s, and when it ends. The full output is shown only if the command fails.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time

QUIET_INTERVAL_SECONDS = 15.0
LIVE_INTERVAL_SECONDS = 0.5
TAIL_LINES = 40


def main(label: str, command: list[str]) -> int:
    """Run `command`, report on it under `label`, and return its exit code (130 after Ctrl-C)."""
    live = sys.stdout.isatty()
    started = time.monotonic()
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    reader = threading.Thread(target=_collect, args=(process, lines), daemon=True)
    reader.start()
    try:
        if not live:
            print(f"{label} ...", flush=True)
        while _still_running(process, LIVE_INTERVAL_SECONDS if live else QUIET_INTERVAL_SECONDS):
            _show(label, time.monotonic() - started, _newest(lines), live)
        reader.join(timeout=5)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        print(f"\n{label}: interrupted", flush=True)
        return 130
    elapsed = time.monotonic() - started
    outcome = "done" if process.returncode == 0 else f"FAILED (exit {process.returncode})"
    print(f"{_clear(live)}{label}: {outcome} in {elapsed:.0f} s", flush=True)
    if process.returncode != 0:
        print("\n".join(lines[-TAIL_LINES:]), file=sys.stderr, flush=True)
    return process.returncode


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    if process.stdout is None:
        return
    for line in process.stdout:
        if line.strip():
            lines.append(line.rstrip())


def _newest(lines: list[str]) -> str:
    return next((line for line in reversed(lines) if not line.startswith("WARNING")), "")


def _still_running(process: subprocess.Popen[str], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _show(label: str, elapsed_seconds: float, last_line: str, live: bool) -> None:
    width = shutil.get_terminal_size().columns - 1 if live else 110
    text = f"{label}: {elapsed_seconds:.0f} s  {last_line.strip()}"[:width]
    print(f"{_clear(live)}{text}", end="" if live else "\n", flush=True)


def _clear(live: bool) -> str:
    return "\r\x1b[K" if live else ""


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: step.py LABEL COMMAND [ARGUMENT ...]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
