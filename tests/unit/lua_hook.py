"""Runs the Lua hook in a plain interpreter, with a stand-in for what slurmctld gives it."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurm_gpushare.protocol.settings import KEYS, Place

ROOT = Path(__file__).resolve().parents[2]
INTERPRETERS = ("lua5.1", "lua5.3", "lua5.4")
KNOWN = "gs-" + "k" * 20
OTHERS = "gs-" + "o" * 20
UNKNOWN = "gs-" + "u" * 20
USER = 1000
NOT_OF_THE_SITE = {key.name for key in KEYS if key.place is not Place.SITE}


@dataclass
class Answer:
    """What the hook did with one job."""

    code: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    """Fields that differ from what the user wrote; an empty string is a cleared one."""
    said: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)

    @property
    def untouched(self) -> bool:
        return self.code == 0 and not self.fields and not self.logged


@dataclass
class LuaHook:
    """One interpreter and the files that the hook reads."""

    interpreter: str
    directory: Path

    @property
    def conf(self) -> Path:
        return self.directory / "gpushare.conf"

    @property
    def generated(self) -> Path:
        return self.directory / "gpushare.generated.conf"

    @property
    def last_good(self) -> Path:
        return self.directory / "gpushare.conf.good"

    @property
    def hook_file(self) -> Path:
        return self.directory / "hook.sqlite"

    def configure(self, **changes: str) -> None:
        keys = {
            "Partitions": "gpu,gpu2",
            "SlurmVersion": "24.11.5",
            "GpusPerNode": "2",
            "HookFile": str(self.hook_file),
            **changes,
        }
        for path, generated in ((self.conf, False), (self.generated, True)):
            own = {name: value for name, value in keys.items() if (name in NOT_OF_THE_SITE) == generated}
            path.write_text("".join(f"{name}={value}\n" for name, value in own.items()))

    def write_hook_file(
        self,
        path: Path | None = None,
        heartbeat_age_s: int = 0,
        cluster: int = 2,
        uid: int = USER,
        gpus: int = 1,
        gangs: int = 0,
        models: str = "",
        cpus: int | None = None,
    ) -> None:
        path = path or self.hook_file
        with closing(sqlite3.connect(path)) as file, file:
            file.executescript("PRAGMA synchronous=OFF; BEGIN;" + (ROOT / "sql" / "hook.sql").read_text())
            row = (KNOWN, uid, models or f"v100={cluster}/{gpus}", cpus)
            file.execute("INSERT INTO workload VALUES (?, ?, ?, ?)", row)
            file.execute("INSERT INTO workload VALUES (?, ?, 'v100=1', 3)", (OTHERS, USER + 1))
            file.execute("UPDATE helper SET heartbeat_s = ?, gangs = ?", (int(time.time()) - heartbeat_age_s, gangs))

    def chunk(self, lua: str, timeout_s: float = 60) -> str:
        """Run the body of ``function(run)``; what it prints."""
        cases = self.directory / "cases.lua"
        cases.write_text(f"return function(run)\n{lua}\nend\n")
        done = subprocess.run(
            [self.interpreter, str(ROOT / "tests/unit/hook_harness.lua"), str(ROOT / "lua_bridge"), str(cases)],
            env={
                "GPUSHARE_CONF": str(self.conf),
                "GPUSHARE_LAST_GOOD": str(self.last_good),
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.directory),
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answers(self, lua: str) -> list[Answer]:
        """What the hook did with each job that the chunk submits."""
        found: list[Answer] = []
        answer = Answer()
        for line in self.chunk(lua).splitlines():
            kind, _, rest = line.partition(" ")
            text = bytes.fromhex(rest.split()[-1] if rest.split() else "").decode("latin-1") if kind != "field" else ""
            if kind == "rc":
                answer = Answer(code=int(text))
            elif kind == "field":
                name, _, value = rest.partition(" ")
                answer.fields[name] = bytes.fromhex(value).decode("latin-1")
            elif kind == "said":
                answer.said.append(text)
            elif kind == "logged":
                answer.logged.append(text)
            elif kind == "end":
                found.append(answer)
        return found

    def submit(self, *, batch: bool = True, uid: int = USER, fail_on: str = "", **desc: str | int) -> Answer:
        options = f"{{batch={str(batch).lower()}, uid={uid}, fail_on={literal(fail_on) if fail_on else 'nil'}}}"
        (answer,) = self.answers(f"run.submit({literal(desc)}, {options})")
        return answer

    def modify(self, record: dict[str, str], *, uid: int = USER, **desc: str | int) -> Answer:
        (answer,) = self.answers(f"run.modify({literal(desc)}, {literal(record)}, {{uid={uid}}})")
        return answer


def literal(value: object) -> str:
    """A Python value as Lua source."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{literal(name)}]={literal(item)}" for name, item in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(f"\\{byte:03d}" for byte in str(value).encode()) + '"'


def make_hook(interpreter: str, directory: Path) -> LuaHook:
    if shutil.which(interpreter) is None:
        pytest.skip(f"no {interpreter}")
    hook = LuaHook(interpreter, directory)
    hook.configure()
    hook.write_hook_file()
    return hook
