"""The command `slackwater`. Exit codes: 0 done, 1 it failed, 2 bad input: one line on stderr says what to change."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Annotated, Literal

import structlog
import typer

from ..engine.errors import (
    AuthFailed,
    ConfigError,
    NoSpace,
    NotFound,
    Refused,
    SlackwaterError,
    Unavailable,
)
from . import cli_attach, cli_checkpoints, cli_config
from .cli_advise import advise
from .cli_coordinator import coordinator
from .cli_explain import explain
from .cli_rebuild import rebuild
from .cli_requests import checkpoint, hold, release, remove, retry, rollback
from .cli_status import log, status
from .cli_top import top
from .cli_up import up

__all__ = ["app", "exit_code", "main"]

_BAD_INPUT = (ConfigError, Refused, AuthFailed, NotFound, NoSpace, Unavailable)

app = typer.Typer(
    name="slackwater",
    help="One consistent version of trainer, rollouts and buffer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    coordinator,
    status,
    top,
    explain,
    advise,
    log,
    checkpoint,
    rollback,
    hold,
    release,
    remove,
    retry,
    rebuild,
    up,
):
    app.command()(command)
app.add_typer(cli_attach.app, name="attach")
app.add_typer(cli_checkpoints.app, name="checkpoints")
app.add_typer(cli_config.app, name="config")


@app.callback()
def _options(
    log_format: Annotated[
        Literal["console", "json"], typer.Option("--log-format", help="Form of the log lines on stderr.")
    ] = "console",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each transaction.")] = False,
) -> None:
    """One consistent version of trainer, rollouts and buffer."""
    _set_up_logging(log_format, logging.DEBUG if verbose else logging.INFO)


def _set_up_logging(log_format: str, level: int) -> None:
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def exit_code(error: SlackwaterError) -> int:
    """2 for what the caller can put right by other arguments or surroundings, 1 for a failure."""
    return 2 if isinstance(error, _BAD_INPUT) else 1


def main() -> None:
    """Run the command line and end the process with its exit code."""
    code = _run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a pipe whose reader has gone
            stream.flush()
    # All is closed by now. The interpreter's own teardown can wait for ever on gRPC's reader threads.
    os._exit(code)


def _run() -> int:
    try:
        app()
    except SlackwaterError as error:
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        typer.echo(f"slackwater: {text or type(error).__name__}", err=True)
        return exit_code(error)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    main()
