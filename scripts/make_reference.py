"""Write the reference from the code: man pages, docs/commands.md, docs/configuration.md.

The commands and their options come from click, the settings from `config.KEYS`. ``--check`` writes nothing and
exits 3 where a file is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from gpushare_lab.cli.main import gpushare_lab

from slurm_gpushare import __version__
from slurm_gpushare.cli.main import gpushare
from slurm_gpushare.protocol.settings import KEYS

ROOT = Path(__file__).resolve().parents[1]
Command = tuple[str, click.Command]
PROGRAMS: dict[str, click.Group] = {"gpushare": gpushare, "gpushare-lab": gpushare_lab}


def commands(program: str) -> Iterator[Command]:
    """Every command of a program with its full name, groups before their members."""
    group = PROGRAMS[program]
    context = click.Context(group, info_name=program)

    def walk(name: str, command: click.Command) -> Iterator[Command]:
        yield name, command
        if isinstance(command, click.Group):
            for member in sorted(command.commands):
                if not command.commands[member].hidden:
                    yield from walk(f"{name} {member}", command.commands[member])

    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from walk(f"{program} {name}", command)


def synopsis(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name)
    return " ".join([name, *command.collect_usage_pieces(context)])


def options(name: str, command: click.Command) -> list[tuple[str, str]]:
    context = click.Context(command, info_name=name)
    records = [param.get_help_record(context) for param in command.get_params(context) if param.name != "help"]
    return [record for record in records if record]


def description(command: click.Command) -> list[str]:
    """The paragraphs of a command's help text."""
    text = (command.help or "").replace("\b\n", "")
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]


def roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line[:1] in {".", "'"} else line for line in escaped.splitlines())


def man_commands(program: str, one_line: str, see_also: str) -> str:
    lines = [
        f'.TH {program.upper()} 1 "" "slurm-gpushare {__version__}" "User Commands"',
        ".SH NAME",
        f"{roff(program)} \\- {one_line}",
        ".SH SYNOPSIS",
        f".B {roff(program)}",
        "[\\-\\-debug] COMMAND [ARGUMENT ...]",
        ".SH DESCRIPTION",
        roff(" ".join(description(PROGRAMS[program]))),
        ".SH COMMANDS",
    ]
    for name, command in commands(program):
        lines += [f".SS {roff(synopsis(name, command))}"]
        lines += [line for paragraph in description(command) for line in (".PP", roff(paragraph))]
        for flag, text in options(name, command):
            lines += [".TP", f".B {roff(flag)}", roff(text) or "\\&"]
    lines += [
        ".SH EXIT STATUS",
        "0 success; 1 failure; 2 wrong usage or unusable input; 3 a check found problems.",
        ".SH ENVIRONMENT",
        ".TP",
        ".B GPUSHARE_CONF",
        "Configuration file, instead of gpushare.conf beside slurm.conf.",
        ".TP",
        ".B NO_COLOR",
        "Any value: no colour.",
        ".SH SEE ALSO",
        f".BR {see_also}",
    ]
    return "\n".join(lines) + "\n"


def man_configuration() -> str:
    lines = [
        f'.TH GPUSHARE.CONF 5 "" "slurm-gpushare {__version__}" "File Formats"',
        ".SH NAME",
        "gpushare.conf \\- settings of slurm\\-gpushare",
        ".SH DESCRIPTION",
        "One",
        ".I Key=Value",
        "a line, beside slurm.conf; keys are case\\-insensitive, # starts a comment, an unknown key is an error.",
        "The submit hook notices a changed file by itself; the helper does so too, within a tick.",
        ".SH KEYS",
    ]
    for key in KEYS:
        lines += [".TP", f".B {key.name}", roff(key.help)]
        if key.values:
            lines.append(f"Values: {roff(', '.join(key.values))}.")
        lines.append(f"Default: {roff(key.default) or 'none'}.")
    lines += [".SH SEE ALSO", ".BR gpushare (1), slurm.conf (5)"]
    return "\n".join(lines) + "\n"


NOTE = "<!-- Written by scripts/make_reference.py from the code: edit there, then run 'make reference'. -->\n"


def cell(text: str) -> str:
    """Text inside a Markdown table."""
    return text.replace("|", "\\|")


def page_commands(program: str, title: str) -> str:
    parts = [NOTE, f"# {title}\n"]
    parts.append("Exit codes: 0 ok, 1 failure, 2 wrong usage or unusable input, 3 a check found problems.\n")
    for name, command in commands(program):
        parts.append(f"## {name}\n\n```\n{synopsis(name, command)}\n```\n")
        parts += [f"{paragraph}\n" for paragraph in description(command) if paragraph]
        if rows := options(name, command):
            parts.append("| option | meaning |\n|---|---|")
            parts += [
                f"| `{flag.replace('|', chr(92) + '|')}` | {text.replace('|', chr(92) + '|')} |" for flag, text in rows
            ]
            parts.append("")
    return "\n".join(parts)


def page_configuration() -> str:
    parts = [NOTE, "# gpushare.conf\n"]
    parts.append(
        "One `Key=Value` a line, beside `slurm.conf` (`GPUSHARE_CONF` overrides). Keys are case-insensitive,\n"
        "`#` starts a comment, an unknown key is an error with its line number.\n"
    )
    parts.append("| key | default | values | meaning |\n|---|---|---|---|")
    parts += [
        f"| `{key.name}` | {f'`{key.default}`' if key.default else 'none'} "
        f"| {', '.join(f'`{value}`' for value in key.values)} | {cell(key.help)} |"
        for key in KEYS
    ]
    return "\n".join(parts) + "\n"


def example_configuration() -> str:
    """Every key at its default, commented out."""
    lines = ["# gpushare.conf, beside slurm.conf. 'gpushare configure --write' makes one for your site.", ""]
    for key in KEYS:
        values = f" One of: {', '.join(key.values)}." if key.values else ""
        lines += [f"# {key.help}{values}", f"#{key.name}={key.default}", ""]
    return "\n".join(lines)


def main() -> None:
    files = {
        "share/man/gpushare.1": man_commands(
            "gpushare",
            "share one GPU between two training jobs under Slurm",
            "gpushare.conf (5), sbatch (1), sacct (1)",
        ),
        "lab/share/man/gpushare-lab.1": man_commands(
            "gpushare-lab", "prove slurm\\-gpushare on emulated GPUs", "gpushare (1)"
        ),
        "share/man/gpushare.conf.5": man_configuration(),
        "docs/commands.md": page_commands("gpushare", "Commands"),
        "docs/lab-commands.md": page_commands("gpushare-lab", "Commands of the lab"),
        "docs/configuration.md": page_configuration(),
        "share/examples/gpushare.conf": example_configuration(),
    }
    stale = [name for name, text in files.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"make_reference: out of date: {', '.join(stale)}. Run 'make reference'.", file=sys.stderr)
            sys.exit(3)
        return
    for name in stale:
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(files[name])


if __name__ == "__main__":
    main()
