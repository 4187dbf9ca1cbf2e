"""The border between commands and a shell: text to stdout, errors as one line on stderr, exit codes.

A reader that went away (`| head`) is never an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import typer

from gristmill.engine.errors import EngineError, ModelRefused
from gristmill.jobs.errors import JobsError, RefusedError

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class UsageRefused(typer.TyperException):
    """Words on the command line that can't be run; the message says what to do."""

    exit_code = EXIT_REFUSED


def to_json(value: Any) -> str:
    """A value as JSON for people and programs."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def to_usage_text(error: typer.TyperException) -> str:
    """The message and, where the words could not be parsed, which help to read."""
    message = error.format_message().replace("Value error, ", "").removesuffix(".")
    context = getattr(error, "ctx", None)
    return f"{message}; see `{context.command_path} --help`" if context is not None else message


def print_out(text: str) -> None:
    """Print to stdout and flush."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        close_quietly(sys.stdout)


def print_error(message: str) -> None:
    """Print one line to stderr, whatever line breaks the message holds."""
    try:
        print(f"gristmill: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        close_quietly(sys.stderr)


def close_quietly(stream: TextIO) -> None:
    """Point a stream without a reader at the null device, so that flushing at exit can't fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def run_guarded(call: Callable[[], int]) -> int:
    """The exit code of `call`; every error has become one line on stderr."""
    try:
        return call()
    except typer.TyperException as error:
        print_error(to_usage_text(error))
        return EXIT_REFUSED
    except (RefusedError, ModelRefused) as error:
        print_error(str(error))
        return EXIT_REFUSED
    except (JobsError, EngineError) as error:
        print_error(str(error))
        return EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted; the same command again goes on")
        return EXIT_INTERRUPTED
    except Exception as error:  # the process border: a person gets a line, a developer asks for more
        if os.environ.get("GRISTMILL_TRACEBACK"):
            raise
        print_error(f"internal error, {type(error).__name__}: {error} (GRISTMILL_TRACEBACK=1 shows where)")
        return EXIT_FAILED


def forget_interrupt() -> None:
    """Let the exit code stand after an interrupt that was handled.

    CPython notes a KeyboardInterrupt that ends code compiled from text, such as sqlalchemy's generated methods, and
    `python -m` then dies of SIGINT whatever was caught and returned since. Code from text clears the note.
    """
    exec("")
