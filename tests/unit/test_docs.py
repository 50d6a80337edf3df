"""The documentation speaks only of what exists, and of all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from gpushare_lab.cli.main import gpushare_lab

from slurm_gpushare.cli.main import gpushare
from slurm_gpushare.protocol.settings import KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
COMMAND = re.compile(
    r"(?:^|[`$(|]|\s-- )(gpushare|gpushare-lab) ((?:[a-z-]+)(?: [a-z]+)?)((?: [^`|;)\n]*)?)", re.MULTILINE
)


PROGRAMS = {"gpushare": gpushare, "gpushare-lab": gpushare_lab}


def find(program: str, words: str) -> click.Command | None:
    """The command that `words` (``db check``) starts with."""
    first, _, second = words.partition(" ")
    group = PROGRAMS[program]
    command = group.get_command(click.Context(group), first)
    if isinstance(command, click.Group) and second in command.commands:
        return command.commands[second]
    return command  # a word that is no subcommand is an argument: gpushare token NAME


def code(text: str) -> str:
    """What stands in code: blocks and spans."""
    blocks = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*blocks, *spans])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_documented_command_and_option_exists(page: Path) -> None:
    for program, words, rest in COMMAND.findall(code(page.read_text())):
        command = find(program, words)
        assert command is not None, f"{program} {words}"
        own = rest.split(" -- ")[0]
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
        known |= {"--sbatch"} if command.name == "token" else set()  # of any word that is no command of its own
        for option in re.findall(r"(?<!\S)(--[a-z][a-z-]+)", own):
            assert option in known, f"{program} {words} has no {option}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


ROOTS = (
    ROOT,
    ROOT / "lab" / "gpushare_lab",
    ROOT / "slurm_gpushare",
    ROOT / "tests",
)
MADE_LATER = {"out/chaos.json", "sql/NNNN_name.sql"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:\w+/)+[\w.]+\.(?:py|lua|sh|c|sql|json|yml|service))`", page.read_text()))
    assert {name for name in named - MADE_LATER if not any((root / name).exists() for root in ROOTS)} == set()


def test_reference_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_settings_named_in_the_guides_exist() -> None:
    known = {key.name for key in KEYS}
    guide = code((ROOT / "docs" / "admin-guide.md").read_text() + (ROOT / "docs" / "troubleshooting.md").read_text())
    ours = {name for name in re.findall(r"\b([A-Z][A-Za-z]+)=", guide) if name not in {"Gres", "Feature"}}
    assert ours <= known, ours - known


def test_every_page_is_reachable_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text()):
            linked = (page.parent / target).resolve()
            if linked not in seen:
                todo.append(linked)
    assert set(PAGES) <= seen, [page.name for page in set(PAGES) - seen]
