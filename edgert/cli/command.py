"""The base of `edgert` and `edgertd`: commands are imported when called, errors become exit codes.

Exit codes: 0 done, 2 usage error, 130 interrupted, 141 for `| head`, else the `exit_code` of the error's class. An
error is one line, `error: ...`, on stderr; with `--json` it is `{"error": {"code", "message"}}` on stdout.
A traceback is printed only if EDGERT_DEBUG is set.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import re
import select
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgert.errors import USAGE_CODE, ConfigInvalid, EdgeRTError
from edgert.extras import missing_package
from edgert.printable import file_error, printable, reason_of
from edgert.vendor_telemetry import stop_reporting

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_INTERNAL = 1
EXIT_OS_ERROR = 4
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141  # a shell's exit code for a program that SIGPIPE ended


class BrokenPipe(Exception):
    """Replaces a BrokenPipeError, because click would end without a message at a BrokenPipeError."""


@contextlib.contextmanager
def _pipes_named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise BrokenPipe from error


class Group(click.Group):
    """A group that suggests the most similar command for an unknown name."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _pipes_named():  # click prints --help here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _pipes_named():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = ctx.resilient_parsing or self.get_command(ctx, args[0])
        if not known and (near := _nearest(args[0], self.list_commands(ctx))):
            ctx.fail(f"no command '{args[0]}': did you mean {near}?")
        return super().resolve_command(ctx, args)


class LazyGroup(Group):
    """A group whose commands are imported when they are called.

    So --help imports no command, and a broken command does not break the other commands.

    Args:
        commands_by_name: Maps a name to ("module:attribute", the command's line in --help). A command with the line ""
            is hidden.
        extra: The extra of edgert that installs the packages of these commands.
    """

    def __init__(
        self, *args: Any, commands_by_name: dict[str, tuple[str, str]], extra: str = "host", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._by_name = commands_by_name
        self._extra = extra

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (_, line) in self._by_name.items() if line]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._by_name:
            return None
        module, _, attribute = self._by_name[cmd_name][0].partition(":")
        try:
            with _no_collections():
                command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise missing_package(error, self._extra) or error from error
        assert isinstance(command, click.Command), f"{module}:{attribute} is not a command"
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names from `commands_by_name`, because click's own method imports every command."""
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=line)
            for name, (_, line) in self._by_name.items()
            if line and name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._by_name.items() if line])


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Switch off the garbage collector during an import, because it would search new modules repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _nearest(word: str, names: list[str]) -> str:
    """Return the name that starts with `word`, else the name with the most similar spelling; "" for none."""
    from difflib import get_close_matches  # imported here, because a start of the daemon does not need it

    return next(iter([name for name in names if name.startswith(word)] or get_close_matches(word, names, 1)), "")


def main_with_errors(command: click.Command, argv: Sequence[str] | None = None) -> int:
    """Run `command` with `argv` (None: the arguments of the process) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    stop_reporting()
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # With PYTHONUNBUFFERED, stdout has no buffer, and `_drop_unwritable` finds only text in a buffer.
        if isinstance(sys.stdout.buffer, io.RawIOBase):
            sys.stdout = open(sys.stdout.fileno(), "w", 1, sys.stdout.encoding, closefd=False)  # noqa: SIM115  # open until the end
        # A terminal or a pipe may have an encoding without some characters. Python sets this for stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command.main(words, prog_name=command.name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except EdgeRTError as error:
        return _fail(as_json, error.code, error.message, error.exit_code, error)
    except click.ClickException as error:
        hinted = _with_hint(error)
        if not as_json:
            shown = io.StringIO()
            hinted.show(shown)
            with contextlib.suppress(OSError):  # the disk is full
                click.echo(re.sub("^Error: ", "error: ", shown.getvalue(), count=1, flags=re.M), nl=False, err=True)
            return error.exit_code
        return _fail(as_json, USAGE_CODE, hinted.format_message(), error.exit_code, error)
    except (KeyboardInterrupt, click.Abort) as error:
        return _fail(as_json, "interrupted", "interrupted", EXIT_INTERRUPTED, error)
    except (BrokenPipe, OSError) as error:
        return _fail_with_os_error(as_json, error)
    except UnicodeEncodeError as error:
        line = error.object[: error.start].rpartition("\n")[2] + error.object[error.start :].partition("\n")[0]
        message = f"{line} is not UTF-8: rename that file or folder, or use a UTF-8 locale"
        return _fail(as_json, ConfigInvalid.code, message, ConfigInvalid.exit_code, error)
    except Exception as error:  # noqa: BLE001 - users never see a traceback
        if (missing := missing_package(error)) is not None:
            return _fail(as_json, missing.code, missing.message, missing.exit_code, error)
        message = (
            f"{type(error).__name__}: {error}; this is a fault in edgert: set EDGERT_DEBUG=1 and report the traceback"
        )
        return _fail(as_json, EdgeRTError.code, message, EXIT_INTERNAL, error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            _drop_unwritable(stream)
        if argv is None:  # the process ends here; without this call, Python first searches all objects for garbage
            gc.freeze()


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed, as with `>&-`.

    Otherwise, the next opened file would get the stream's descriptor, and a library that prints would damage this file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # open until the process ends
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _with_hint(error: click.ClickException) -> click.ClickException:
    """Add the next step: how to give several values to one argument, or the place of --json."""
    is_json = isinstance(error, click.NoSuchOption) and error.option_name == "--json"
    if is_json and isinstance(error, click.UsageError) and error.ctx and isinstance(error.ctx.command, click.Group):
        return click.UsageError("give --json after the command", error.ctx)
    if error.message.startswith("Got unexpected extra argument") and isinstance(error, click.UsageError) and error.ctx:
        for param in error.ctx.command.params:
            if hint := getattr(param.type, "hint_about_more", ""):
                return click.UsageError(f"{error.message}. {hint}", error.ctx)
    return error


def _fail(as_json: bool, code: str, message: str, exit_code: int, error: BaseException) -> int:
    if os.environ.get("EDGERT_DEBUG"):
        import traceback

        traceback.print_exception(error)
    if removed := _removed_folder():
        message = (
            f"the working folder {removed} was removed: change to an existing folder, then run this again ({message})"
        )
    try:
        if as_json:
            click.echo(json.dumps({"error": {"code": code, "message": message}}))
            return exit_code
    except OSError:  # the disk of stdout is full; stderr may still work
        pass
    with contextlib.suppress(OSError):
        click.echo(f"error: {printable(message)}", err=True)
    return exit_code


def _removed_folder() -> str:
    """Return the path of the working folder if the folder was removed, else ""."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return os.environ.get("PWD") or "."
    return ""


def _fail_with_os_error(as_json: bool, error: BrokenPipe | OSError) -> int:
    cause = error if isinstance(error, OSError) else error.__cause__
    assert isinstance(cause, OSError)
    unwritable = _drop_unwritable(sys.stdout)
    if isinstance(cause, BrokenPipeError) and (unwritable or _has_no_reader(sys.stdout)):
        return EXIT_NO_READER
    if unwritable:
        message = (
            f"the output could not be written: {reason_of(unwritable)}. The command may have done its work: check this "
            "before you run it again, and redirect the output to another place"
        )
        return _fail(False, "os_error", message, EXIT_OS_ERROR, cause)
    return _fail(as_json, "os_error", file_error(cause), EXIT_OS_ERROR, cause)


def _drop_unwritable(stream: TextIO) -> OSError | None:
    """Drop the text that `stream` cannot write; with this text, Python would end with exit code 120."""
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _has_no_reader(stream: TextIO) -> bool:
    """Return whether `stream` is a pipe or a socket whose other end is closed, as with `| head`."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # POLLERR and POLLHUP are always reported
    return bool(poll.poll(0))
