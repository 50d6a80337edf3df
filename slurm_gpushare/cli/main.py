"""Entry point: the list of subcommands, loaded when called, and the one place that reports errors."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import click

from slurm_gpushare import __version__
from slurm_gpushare.errors import Exit, GpushareError


@dataclass(frozen=True)
class LazyCommand:
    """A subcommand by address, so that ``gpushare --help`` imports none of them."""

    target: str  # module:attribute
    help: str


COMMANDS: dict[str, LazyCommand] = {
    "demo": LazyCommand("slurm_gpushare.cli.demo:demo", "Show jobs sharing GPUs on a throw-away Slurm."),
    "backfill": LazyCommand(
        "slurm_gpushare.cli.backfill:backfill", "Run the backfill helper: place complementary jobs on the same card."
    ),
    "release": LazyCommand(
        "slurm_gpushare.cli.backfill:release", "Give pending jobs that we touched their original requests back."
    ),
    "profile": LazyCommand("slurm_gpushare.cli.profile:profile", "Run a command in a job and profile its first epoch."),
    "configure": LazyCommand(
        "slurm_gpushare.cli.configure:configure", "Print what to add to the site's files, each line with its reason."
    ),
    "characterize": LazyCommand(
        "slurm_gpushare.cli.characterize:characterize", "Characterise public workloads as the paper does."
    ),
    "kb": LazyCommand("slurm_gpushare.cli.kb:kb", "Fit, show, ask and feed the knowledge base."),
    "model": LazyCommand("slurm_gpushare.cli.model:model", "Fit, show and use the model that clusters profiles."),
    "db": LazyCommand("slurm_gpushare.cli.db:db", "Look after the store: check, migrate, backup, prune."),
    "doctor": LazyCommand("slurm_gpushare.cli.doctor:doctor", "Check the set-up, each line with its fix."),
    "ingest": LazyCommand("slurm_gpushare.cli.ingest:ingest", "Take waiting telemetry records into the store."),
    "job": LazyCommand(
        "slurm_gpushare.cli.job:job", "Explain a job: its cluster, its place, why it waits, what sharing costs it."
    ),
    "jobs": LazyCommand(
        "slurm_gpushare.cli.status:jobs", "List the jobs that take part: cluster, place, partner, slow-down."
    ),
    "metrics": LazyCommand(
        "slurm_gpushare.cli.metrics:metrics", "Print figures for Prometheus, in node_exporter's textfile format."
    ),
    "status": LazyCommand(
        "slurm_gpushare.cli.status:status", "Show every GPU of the shared partitions: who is on it and what it costs."
    ),
    "report": LazyCommand("slurm_gpushare.cli.report:report", "Show what was shared, what it cost and what it saved."),
    "simulate": LazyCommand("slurm_gpushare.cli.simulate:simulate", "Run our policy and its peers on the same jobs."),
    "testbed": LazyCommand("slurm_gpushare.cli.testbed:testbed", "A real throw-away Slurm with emulated V100s."),
    "token": LazyCommand("slurm_gpushare.cli.token:token", "Make or show your token for a workload."),
}  # fmt: skip


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module only when that subcommand runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        module, _, attribute = lazy.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="gpushare")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
def gpushare(debug: bool) -> None:
    """Let two training jobs share one GPU when they do not get in each other's way."""


# click before 8.2 prints the help and exits by itself.
_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)])
)


def _report(message: str) -> None:
    one_line = " ".join(message.split())
    click.echo(f"gpushare: error: {one_line}", err=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit; every failure becomes one line and an exit code here."""
    argv = sys.argv[1:] if argv is None else argv
    code: Any
    try:
        code = gpushare.main(args=argv, prog_name="gpushare", standalone_mode=False)
    except GpushareError as error:
        if "--debug" in argv:
            raise
        _report(str(error))
        code = error.exit_code
    except click.Abort:
        code = 130
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message(), err=True)
        code = Exit.USAGE
    except click.ClickException as error:
        hint = f" Try '{error.ctx.command_path} --help'." if isinstance(error, click.UsageError) and error.ctx else ""
        _report(error.format_message() + hint)
        code = Exit.USAGE if isinstance(error, click.UsageError) else Exit.FAILURE
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away (| head): nothing more to say
        code = Exit.OK
    except Exception as error:
        if "--debug" in argv:
            raise
        _report(f"{type(error).__name__}: {error}. This is a bug: run again with 'gpushare --debug ...' and report it.")
        code = Exit.FAILURE
    sys.exit(code if isinstance(code, int) else Exit.OK)
