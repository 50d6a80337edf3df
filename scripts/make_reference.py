"""Write what is made from the code: man pages, reference pages, and the tables that Lua and shell share with Python.

The commands and their options come from click, the rest from `slurm_gpushare.protocol`. ``--check`` writes nothing and
exits 3 where a file is out of date.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
from gpushare_lab.cli.main import gpushare_lab

from slurm_gpushare import __version__
from slurm_gpushare.cli.main import gpushare
from slurm_gpushare.helper.explain import DONE, Code, Reason, words
from slurm_gpushare.protocol.attributes import ACTIVITY, CARD, JOB, NODE
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.release import CAPABILITIES
from slurm_gpushare.protocol.settings import GENERATED_SUFFIX, KEYS, Key, Place
from slurm_gpushare.protocol.tag import LETTERS, LONGEST, PREFIX
from slurm_gpushare.protocol.tokens import LETTERS_32, OPTIONS, TOKEN_LENGTHS

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


SITE, GENERATED, CONSTANT = ([key for key in KEYS if key.place is place] for place in Place)
HEADINGS = (
    (SITE, "What a site sets", ""),
    (GENERATED, "What configure works out",
     f"'gpushare configure --write' writes these into a file of their own beside gpushare.conf, *{GENERATED_SUFFIX}, "
     "which nobody edits. In gpushare.conf they count only while that file does not say them, with a warning."),
    (CONSTANT, "What is the same everywhere",
     "An older gpushare.conf may have these. Another value than ours is obeyed for two more releases, with a warning."),
)  # fmt: skip


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
    ]
    for keys, heading, note in HEADINGS:
        lines += [f".SH {heading.upper()}", *([roff(note)] if note else [])]
        for key in keys:
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
    for keys, heading, note in HEADINGS:
        parts.append(f"## {heading}\n" + (f"\n{note}\n" if note else ""))
        parts.append("| key | default | values | meaning |\n|---|---|---|---|")
        parts += [
            f"| `{key.name}` | {f'`{key.default}`' if key.default else 'none'} "
            f"| {', '.join(f'`{value}`' for value in key.values)} | {cell(key.help)} |"
            for key in keys
        ]
        parts.append("")
    return "\n".join(parts)


ROOMS = {"Activity on the GPU": ACTIVITY, "The card": CARD, "The job's processes": JOB, "The node": NODE}


def page_attributes() -> str:
    """What telemetry may hold."""
    parts = [NOTE, "# Attributes of a profile\n"]
    parts.append(
        "Left out of the paper's 66 are the six that describe what the user runs (ID, model, data set, epochs,\n"
        "batch size, environment) and system calls, which Linux does not count. Where the paper has three columns for\n"
        "an attribute (ran, max, min) the record has all of max, mean, min, p95 and sd.\n"
    )
    for heading, attributes in ROOMS.items():
        parts.append(f"## {heading}\n\n| attribute | unit | read from | the paper's name |\n|---|---|---|---|")
        parts += [f"| `{a.name}` | {a.unit or 'count'} | {cell(a.source)} | {a.paper} |" for a in attributes]
        parts.append("")
    return "\n".join(parts)


def example_configuration() -> str:
    """Every key that a site may set at its default, commented out."""
    lines = ["# gpushare.conf, beside slurm.conf. 'gpushare configure --write' makes one for your site.", ""]
    for key in SITE:
        values = f" One of: {', '.join(key.values)}." if key.values else ""
        lines += [f"# {key.help}{values}", f"#{key.name}={key.default}", ""]
    return "\n".join(lines)


MADE = "Written by scripts/make_reference.py from slurm_gpushare/protocol/: edit there, then run 'make reference'."


def lua(value: object) -> str:
    """A value as Lua source."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {lua(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "{ " + ", ".join(map(lua, value)) + " }"
    if isinstance(value, bool | int):
        return str(value).lower()
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def lua_key(key: Key) -> str:
    about = {"attribute": key.attribute, "kind": key.kind.name, "default": key.default, "bounds": key.kind.bounds}
    return lua({name: value for name, value in about.items() if value != ()})


def lua_protocol() -> str:
    """The module that the hook and the client filter read everything from that Python knows too."""
    tables: dict[str, dict[str, str]] = {
        "KEYS": {key.name.lower(): lua_key(key) for key in KEYS if key.hook},
        "PLACES": {key.name.lower(): lua(key.place.value) for key in KEYS},
        "SINCE": {name: lua(since.number) for name, since in CAPABILITIES.items()},
        "LETTERS": {attribute: lua(letter) for attribute, letter in LETTERS.items()},
        "OPTIONS": dict.fromkeys(OPTIONS, "true"),
    }
    values = {
        "PREFIX": PREFIX,
        "LONGEST": LONGEST,
        "TOKEN_MIN": TOKEN_LENGTHS[0],
        "TOKEN_MAX": TOKEN_LENGTHS[1],
        "LETTERS_32": LETTERS_32,
    }
    parts = [f"-- {MADE}\n", "local M = {}\n"]
    parts += [f"M.{name} = {lua(value)}" for name, value in values.items()]
    for table, rows in tables.items():
        parts += ["", f"M.{table} = {{", *(f"  {name} = {text}," for name, text in rows.items()), "}"]
    return "\n".join([*parts, "", "return M", ""])


def shell_words(keys: list[Key]) -> str:
    return textwrap.fill(" ".join(key.name.lower() for key in keys), 112)


def shell_protocol(script: str) -> str:
    """common.sh with what it knows of settings and releases, between the two marks."""
    node = [key for key in KEYS if key.node]
    table = "\n".join([
        f"# {MADE}",
        "# Kinds and defaults of the settings that a node needs, and the names of all others.",
        "declare -gA GS_KINDS=(",
        *(f"  [{key.name.lower()}]={':'.join((key.kind.name, *key.kind.bounds))}" for key in node),
        ")",
        "declare -gA GS_DEFAULTS=(",
        *(f"  [{key.name.lower()}]='{key.default}'" for key in node),
        ")",
        f"GS_SITE='{shell_words(SITE)}'",
        f"GS_NOT_OF_SITE='{shell_words([*GENERATED, *CONSTANT])}'",
        f"GS_WRITES_GRES_WITH_SLASH={CAPABILITIES['writes_gres_with_slash'].number}",
        "",
    ])  # fmt: skip
    before, _, rest = script.partition(MARK)
    _, _, after = rest.partition(END_MARK)
    return f"{before}{MARK}{table}{END_MARK}{after}"


MARK, END_MARK = "# >>> made\n", "# <<< made\n"


def told(node: ast.expr | None) -> str:
    """A text of the code as its reader sees it, with an ellipsis for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(told(part) if isinstance(part, ast.Constant) else "..." for part in node.values)
    return "..." if node is not None else ""


def cells(*words: str) -> str:
    return "| " + " | ".join(" ".join(text.split()).replace("|", "\\|") for text in words) + " |"


def errors() -> list[str]:
    """What commands and helper end with: what and why, and what to do."""
    found = set()
    for path in sorted((ROOT / "slurm_gpushare").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                known = getattr(importlib.import_module("slurm_gpushare.protocol.errors"), node.exc.func.id, None)
                if isinstance(known, type) and issubclass(known, GpushareError) and node.exc.args:
                    found.add(cells(*(told(part) for part in (*node.exc.args, None)[:2])))
    return sorted(found)


LITERAL = r'"((?:[^"\\\\]|\\\\.)*)"'


def sbatch_lines() -> tuple[list[str], list[str]]:
    """What hook and client filter say: lines that have a name in the code, and those that stand where they hold."""
    named, beside = set(), set()
    for path in sorted((ROOT / "lua_bridge").glob("*.lua")):
        text = path.read_text()
        for found in re.findall(rf"^local [A-Z_]+ = ({LITERAL}(?:\n  \.\. {LITERAL})*)", text, re.MULTILINE):
            named.add("".join(re.findall(LITERAL, found[0])))
            text = text.replace(found[0], "")
        for line in text.splitlines():
            if not re.search(r"^\s*--|log\(|error\(|assert\(|match\(|\.\. reason|bad value", line):
                beside |= {
                    ("..." if before else "") + said + ("..." if more else "")
                    for before, said, more in re.findall(rf"(\.\. )?{LITERAL}( \.\.)?", line)
                    if len(re.findall(r"[a-z]{2,} ", said)) > 1 and said[0] not in "(:"
                }
    named -= {line for line in named if " " not in line or line.startswith("SELECT")}
    return [sorted(map(cells, lines)) for lines in (named, beside)]  # type: ignore[return-value]


def page_messages() -> str:
    """Everything that users and administrators are told, in a row."""
    lines, reasons_not_to = sbatch_lines()
    empty = dict.fromkeys(("partner", "why", "would", "seen", "mem_mib"), "...")
    reasons = [cells(f"`{code}`", *words(Reason(code, None, 1.0))) for code in Code]
    decided = [cells(f"`{kind}`", text.format(**empty)) for kind, text in DONE.items()]
    parts = (
        ("What sbatch says", ("line",), lines),
        ("Why sbatch says that a job does not share, or refuses a change", ("line",), reasons_not_to),
        ("Why a job waits", ("word", "why", "what would have to change"), reasons),
        ("What was decided about a job", ("kind", "as 'gpushare job' tells it"), decided),
        ("Errors", ("what, and why", "what to do"), errors()),
    )
    page = [f"<!-- {MADE} -->", "# Messages", "", "All that is said, with an ellipsis for what is filled in."]
    for title, head, rows in parts:
        page += ["", f"## {title}", "", cells(*head), cells(*["---"] * len(head)), *rows]
    return "\n".join(page) + "\n"


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
        "docs/attributes.md": page_attributes(),
        "docs/messages.md": page_messages(),
        "share/examples/gpushare.conf": example_configuration(),
        "lua_bridge/gpushare_protocol.lua": lua_protocol(),
        "prolog/common.sh": shell_protocol((ROOT / "prolog/common.sh").read_text()),
    }
    stale = [name for name, text in files.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        stale = [name for name in stale if name != "docs/messages.md"]  # any message changes it: it follows later
        if stale:
            print(f"make_reference: out of date: {', '.join(stale)}. Run 'make reference'.", file=sys.stderr)
            sys.exit(3)
        return
    for name in stale:
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(files[name])


if __name__ == "__main__":
    main()
