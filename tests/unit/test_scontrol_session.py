"""The scontrol that stays open: what it takes, and what sends the caller to a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_gpushare.slurm import runner
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.runner import ControllerDown, ScontrolSession

# Prompts, echoes and answers as Slurm's own does where it reads from a pipe.
SCONTROL = """#!/bin/bash
echo start >>"$0.starts"
printf 'scontrol: '
while read -r line; do
  echo "$line" >>"$0.lines"
  if ((${#line} > 70)); then printf '\\r<%s\\n' "${line: -60}"; else echo "$line"; fi
  case $line in
    *JobId=13*) echo "Invalid job id specified for job 13" ;;
    *JobId=666*) exit 1 ;;
    *JobId=0*) sleep 60 ;;
  esac
  printf 'scontrol: '
done
"""


class Fake:
    """A scontrol of our own in front of the real one, and what it was told."""

    def __init__(self, directory: Path, text: str = SCONTROL) -> None:
        self.path = directory / "scontrol"
        self.path.write_text(text)
        self.path.chmod(0o755)

    def _read(self, suffix: str) -> list[str]:
        path = self.path.with_name(f"scontrol.{suffix}")
        return path.read_text().splitlines() if path.exists() else []

    @property
    def lines(self) -> list[str]:
        return self._read("lines")

    @property
    def starts(self) -> int:
        return len(self._read("starts"))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Fake(tmp_path)


@pytest.fixture
def session() -> Iterator[ScontrolSession]:
    session = ScontrolSession()
    yield session
    session.close()


def test_many_changes_take_one_process(fake: Fake, session: ScontrolSession) -> None:
    for job in range(1, 6):
        assert session.took(["update", f"JobId={job}", "ReqNodeList=", "AdminComment=GS1:c=2;o=gpu:1"])
    assert fake.starts == 1
    assert fake.lines[0] == "update JobId=1 ReqNodeList= AdminComment=GS1:c=2;o=gpu:1"
    assert len(fake.lines) == 5


@pytest.mark.parametrize(
    "value", ["two words", "'quoted'", 'a"b', "tab\there", "line\nbreak", "caf\u00e9", "a\\b", "!!", "#"]
)
def test_what_a_line_of_input_would_change_is_not_given_to_it(fake: Fake, session: ScontrolSession, value: str) -> None:
    assert not session.took(["update", "JobId=1", f"AdminComment={value}"])
    assert fake.lines == []


def test_after_a_word_of_slurms_a_process_of_its_own_says_what_is_wrong(fake: Fake, session: ScontrolSession) -> None:
    asked: list[list[str]] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        return ""

    slurm = Slurm(run, session)
    slurm.update_job("12", {"Nice": "0"})
    assert asked == []
    slurm.update_job("13", {"Nice": "0"})
    assert asked == [["scontrol", "update", "JobId=13", "Nice=0"]]
    assert slurm.calls == 2


def test_of_a_long_line_only_the_end_is_echoed(fake: Fake, session: ScontrolSession) -> None:
    tag = f"AdminComment=GS1:c=2;t=gs-{'a' * 60};o=gpu:1"
    assert session.took(["update", "JobId=1", tag])
    assert not session.took(["update", "JobId=13", tag]), "what was said after it still counts"
    assert fake.lines == [f"update JobId={job} {tag}" for job in (1, 13)]


@pytest.mark.parametrize("said", [b"", b"\n", b"Invalid job id\n", b"\r<Nice=1\n", b"update JobId=1 Nice=0\nno\n"])
def test_anything_but_the_echo_is_a_word(said: bytes) -> None:
    assert not runner._said_nothing(said, b"update JobId=1 Nice=0")
    assert runner._said_nothing(b"update JobId=1 Nice=0\n", b"update JobId=1 Nice=0")


def test_one_that_dies_is_started_anew(fake: Fake, session: ScontrolSession) -> None:
    assert session.took(["update", "JobId=1"])
    assert not session.took(["update", "JobId=666"])
    assert session.took(["update", "JobId=2"])
    assert fake.starts == 2


def test_it_is_started_anew_before_it_remembers_too_much(
    fake: Fake, session: ScontrolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LINES", 3)
    assert all(session.took(["update", f"JobId={job}"]) for job in range(1, 8))
    assert fake.starts == 3


def test_no_answer_is_a_controller_that_is_down(
    fake: Fake, session: ScontrolSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "DEFAULT_TIMEOUT_S", 0.3)
    with pytest.raises(ControllerDown, match="no answer within"):
        session.took(["update", "JobId=0"])
    monkeypatch.undo()


@pytest.mark.parametrize("text", ["#!/bin/sh\necho nonsense\n", "#!/bin/sh\nexec sleep 60\n", None])
def test_one_that_does_not_prompt_is_left_alone(
    fake: Fake, session: ScontrolSession, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(runner, "START_S", 0.3)
    if text is None:
        fake.path.unlink()
        monkeypatch.setenv("PATH", str(fake.path.parent))
    else:
        Fake(fake.path.parent, text)
    assert not session.took(["update", "JobId=1"])
    Fake(fake.path.parent)
    assert not session.took(["update", "JobId=1"]), "not again at once"
    assert fake.starts == 0
