"""Entry point: the list of subcommands, loaded when called, and the one place that reports errors."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Set
from typing import Any

import click

from slurm_gpushare import __version__
from slurm_gpushare.protocol.errors import EXTRA_OF, Exit, GpushareError, NotInstalled

FOR_USERS = {
    "token": "Make or show your token for a workload.",
    "profile": "Run a command in a job and profile its first epoch.",
    "jobs": "List the jobs that take part: place, neighbour, slow-down, why they wait.",
    "job": "Explain jobs: what they use, their place, why they wait, what sharing costs.",
    "status": "Show every GPU of the shared partitions: who is on it and what it costs.",
    "report": "Show what was shared, what it cost and what it saved.",
    "optout": "Take pending jobs of yours out of sharing.",
}
FOR_ADMINISTRATORS = {
    "assess": "Say what sharing would do here, from the site's own history.",
    "configure": "Print what to add to the site's files, each line with its reason.",
    "doctor": "Check the set-up, each line with its fix.",
    "card-check": "Try on a real card what slurm-gpushare relies on.",
    "backfill": "Run the backfill helper: place complementary jobs on the same card.",
    "release": "Give pending jobs that we touched their original requests back.",
    "off": "Take nodes or cards out of sharing at once, without a drain.",
    "on": "Let nodes or cards share again that were taken out.",
    "db": "Look after the store and its records of strikes and broken promises.",
    "kb": "Fit, show, ask and feed the knowledge base.",
    "metrics": "Print figures for Prometheus, in node_exporter's textfile format.",
}
SECTIONS = {"Commands for users": FOR_USERS, "Commands for administrators": FOR_ADMINISTRATORS}
"""Subcommands and their help, so that ``gpushare --help`` imports none of them. Each is a function of that name."""
_MODULES = {"card-check": "card_check", "release": "backfill", "jobs": "status", "on": "off", "optout": "off"}
"""Where that is not the module of the same name."""
_EARLIER = {"model": "kb clusters", "ingest": "db ingest"}
"""Words of earlier releases, which work and are not shown, and what they are called now."""

CLEANS_UP = frozenset({"backfill", "profile"})
"""Commands that have something to undo when Ctrl-C is pressed; the others just end."""


MOST_LETTERS = 200
"""Of a word in an error: a name of thousands of letters would hide what is said of it."""


class ReaderLeft(Exception):
    """Whoever read our output went away (| head). click would call that a failure; nothing failed."""


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module, of `PACKAGE`, only when that subcommand runs."""

    PACKAGE = "slurm_gpushare.cli"
    SECTIONS: Mapping[str, Mapping[str, str]] = SECTIONS
    MODULES: Mapping[str, str] = _MODULES
    EARLIER: Mapping[str, str] = _EARLIER

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as gone:
            raise ReaderLeft from gone

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in self.SECTIONS.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name, *rest = self.EARLIER.get(cmd_name, cmd_name).split() or [""]
        if name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{self.PACKAGE}.{self.MODULES.get(name, name)}")
        command = getattr(module, name.replace("-", "_"))
        for word in rest:
            command = command.commands[word]
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="gpushare")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def gpushare(debug: bool) -> None:
    """Let two training jobs share one GPU when they do not get in each other's way."""


# click before 8.2 prints the help and exits by itself.
_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


def _report(program: str, message: str) -> None:
    words = (word if len(word) <= MOST_LETTERS else f"{word[:MOST_LETTERS]}..." for word in message.split())
    one_line = " ".join(words)
    click.echo(f"{program}: error: {one_line}", err=True)


_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def _unforeseen(program: str, error: Exception) -> str:
    module = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module in EXTRA_OF:
        return str(NotInstalled(module, EXTRA_OF[module]))
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return f"{error.filename or 'output'}: cannot be written: {error.strerror}. Make room, or write elsewhere."
    return f"{type(error).__name__}: {error}. This is a bug: run again with '{program} --debug ...' and report it."


def _forget_output() -> None:
    """What could not be written must not be tried again at the end, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str] | None = None) -> None:
    """``gpushare``: run the command line and exit."""
    run(gpushare, "gpushare", CLEANS_UP, sys.argv[1:] if argv is None else argv)


def run(group: click.Group, program: str, cleans_up: Set[str], argv: list[str]) -> None:
    """Run a command line and exit; every failure becomes one line and an exit code here."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL and cleans_up & set(argv):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any
    try:
        code = group.main(args=argv, prog_name=program, standalone_mode=False)
    except GpushareError as error:
        if "--debug" in argv:
            raise
        _report(program, str(error))
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)
        code = Exit.USAGE
    except click.ClickException as error:
        hint = f" Try '{error.ctx.command_path} --help'." if isinstance(error, click.UsageError) and error.ctx else ""
        _report(program, error.format_message().rstrip(".") + "." + hint)
        code = Exit.USAGE if isinstance(error, click.UsageError) else Exit.FAILURE
    except ReaderLeft:
        _forget_output()
        code = Exit.OK
    except Exception as error:
        if "--debug" in argv:
            raise
        _report(program, _unforeseen(program, error))
        _forget_output()
        code = Exit.FAILURE
    sys.exit(code if isinstance(code, int) else Exit.OK)
