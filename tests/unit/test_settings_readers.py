"""gpushare.conf has three readers: Python, the hook's Lua and the prolog's shell. They read the same thing."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lua_hook import ROOT

from slurm_gpushare.protocol.errors import ConfigError
from slurm_gpushare.protocol.settings import KEYS, Config, Place, generated_path, parse_config
from slurm_gpushare.protocol.settings_in_force import settings_in_force

SHELL_KEYS = {"partitions": "partitions", "state_dir": "state_dir", "dcgm_dir": "dcgm_job_mapping_dir",
              "spool_dir": "spool_dir", "slurm_user": "slurm_user", "hold_s": "epilog_hold_s",
              "framework_memory": "framework_memory"}  # fmt: skip
LUA_NAMES = {"partitions", "shards_per_gpu", "gpu_models", "gpus_per_node", "def_cpu_per_gpu", "def_mem_per_gpu_mib",
             "hook_file", "lease_s", "heartbeat_s", "policy", "raw_shards"}  # fmt: skip


class Readers:
    """The Lua and the shell reader, each in one process that stays: a new one for each input would take minutes."""

    def __init__(self, directory: Path) -> None:
        loop = f"""
. {ROOT}/prolog/common.sh
while IFS= read -r file; do
  gs_parse_conf "$file" && echo good || echo bad
  printf '%s\\0' "$gs_partitions" "$gs_statedir" "$gs_dcgmjobmappingdir" "$gs_spooldir" \\
    "$gs_slurmuser" "$gs_epiloghold" "$gs_frameworkmemory"
  echo
done"""
        script = directory / "read.lua"
        script.write_text(_LUA)
        self._file = directory / "gpushare.conf"
        self._shell = _started(["bash", "-c", loop])
        self._lua = _started(["lua5.4", str(script), str(ROOT / "lua_bridge")])

    def close(self) -> None:
        for process in (self._shell, self._lua):
            assert process.stdin
            process.stdin.close()
            process.wait(10)

    def _ask(self, process: subprocess.Popen[bytes]) -> tuple[bool, list[str]]:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{self._file}\n".encode())
        process.stdin.flush()
        good = process.stdout.readline() == b"good\n"
        return good, process.stdout.readline().decode().rstrip("\n").split("\0")[:-1]

    def write(self, text: str, generated: str | None) -> None:
        self._file.write_bytes(text.encode())
        beside = generated_path(self._file)
        beside.unlink(missing_ok=True)
        if generated is not None:
            beside.write_bytes(generated.encode())

    def shell(self, text: str, generated: str | None = None) -> dict[str, str] | None:
        self.write(text, generated)
        good, values = self._ask(self._shell)
        return dict(zip(SHELL_KEYS, values, strict=True)) if good else None

    def lua(self, text: str, generated: str | None = None) -> dict[str, str] | None:
        self.write(text, generated)
        good, values = self._ask(self._lua)
        return dict(zip(values[::2], values[1::2], strict=True)) if good else None


_LUA = """
local directory, loaded = arg[1], {}
local function load(name)
  loaded[name] = loaded[name] or loadfile(directory .. "/" .. name .. ".lua")(load, {})
  return loaded[name]
end
local conf = load("gpushare_site")
local function flat(value)
  if type(value) ~= "table" then return tostring(value) end
  local list = {}
  for name, item in pairs(value) do list[#list + 1] = name .. (item == true and "" or ":" .. item) end
  table.sort(list)
  return table.concat(list, ",")
end
for path in io.lines() do
  local file = io.open(path); local text = file:read("*a"); file:close()
  file = io.open((path:gsub("%.conf$", ".generated.conf")))
  local generated = file and file:read("*a")
  if file then file:close() end
  local found = conf.parse(text, generated)
  print(found and "good" or "bad")
  for name, value in pairs(found or {}) do io.write(name, "\\0", flat(value), "\\0") end
  print(); io.flush()
end
"""


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    found = Readers(tmp_path_factory.mktemp("readers"))
    yield found
    found.close()


def _as_text(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(sorted(f"{name}:{number}" for name, number in value.items()))
    if isinstance(value, tuple):
        return ",".join(sorted(set(value)))
    return "" if value is None else str(value)


def _python(text: str) -> Config | None:
    try:
        return parse_config(text)
    except ConfigError:
        return None


BLANKS = st.text(" \t\r", max_size=2)
NAMES = st.sampled_from(
    [key.name for key in KEYS] + [key.name.lower() for key in KEYS] + ["Nonsense", "", "Kéy", "\u212aey"]
)
VALUES = st.one_of(
    st.sampled_from(["", "yes", "no", "gpu", "gpu, a b", "gpu,debug ,", "/x", "x", "0", "1", "2", "2.0", "2.5", ".5",
                     "1e0", "64", "65", "007", "gpu:8", "gpu:8,debug:4", "gpu:x", "off", "DENY", "1_0", "\u0663", "nan",
                     "24.11.5"]),
    st.text(st.characters(blacklist_characters="\n\0", blacklist_categories=["Cs"]), max_size=8),
)  # fmt: skip
LINES = st.one_of(
    st.builds("{}{}{}={}{}{}".format, BLANKS, NAMES, BLANKS, BLANKS, VALUES, BLANKS),
    st.sampled_from(["", "# a comment", "Policy=off # with a reason", "no equals sign", "=", " = x"]),
)
FILES = st.lists(LINES, max_size=6).map("\n".join)
OWN = {"shell": set(SHELL_KEYS.values()), "lua": LUA_NAMES | {"slurm_version"}}


def _faults(text: str) -> set[str]:
    """What is wrong with the file: attributes whose value is bad, or ``line`` for anything else."""
    wrong = set()
    lines = text.split("\n")
    for key in KEYS:
        kept = [
            line for line in lines if line.partition("=")[0].split("#")[0].strip(" \t\r").lower() == key.name.lower()
        ]
        if len(kept) == 1 and _python(kept[0]) is None:
            wrong.add(key.attribute)
            lines.remove(kept[0])
    return wrong if _python("\n".join(lines)) is not None else wrong | {"line"}


@settings(max_examples=400)
@given(FILES)
@example("Partitions=gpu\x0bx")
@example("Partitions=gpu\u2028StateDir=/x")
@example("EpilogHold=02.00")
def test_three_readers_read_the_same(readers: Readers, text: str) -> None:
    config, wrong = _python(text), _faults(text)
    shell, lua = readers.shell(text), readers.lua(text)
    for found, own in ((shell, OWN["shell"]), (lua, OWN["lua"])):
        assert (found is None) == bool(wrong & (own | {"line"})), (
            f"only a value of another reader's key may pass: {wrong}"
        )
    if config is None:
        return
    assert shell is not None
    assert lua is not None
    for name, attribute in SHELL_KEYS.items():
        value = getattr(config, attribute)
        if name == "hold_s":
            assert float(shell[name]) == value
        elif name == "partitions":
            assert set(filter(None, shell[name].split(","))) == set(value)
        else:
            assert shell[name] == _as_text(value)
    assert {name: lua[name] for name in LUA_NAMES} == {name: _as_text(getattr(config, name)) for name in LUA_NAMES}


class TestTheGeneratedFile:
    """What configure works out stands beside gpushare.conf; what stands there counts, for all three readers alike."""

    CASES = (
        ("Partitions=gpu", "SlurmUser=slurm2\nGpusPerNode=8\nSlurmVersion=24.11.5"),
        ("Partitions=gpu\nSlurmUser=old\nGpusPerNode=2\nSlurmVersion=22.05.8", "SlurmUser=new\nGpusPerNode=8"),
        ("Partitions=gpu\nSlurmUser=old\nHeartbeatSeconds=9\nStateDir=/x", None),
        ("Partitions=gpu\nHeartbeatSeconds=9", "HeartbeatSeconds=7\nStateDir=/y"),
        ("Partitions=gpu", "Partitions=other\nGpusPerNode=3"),
    )

    @pytest.mark.parametrize(("text", "generated"), CASES)
    def test_three_readers_read_the_same(self, readers: Readers, text: str, generated: str | None) -> None:
        config = parse_config(text, generated=generated)
        shell, lua = readers.shell(text, generated), readers.lua(text, generated)
        assert shell is not None
        assert lua is not None
        assert shell["slurm_user"] == config.slurm_user
        assert shell["state_dir"] == str(config.state_dir)
        assert shell["partitions"] == lua["partitions"] == "gpu" == ",".join(config.partitions)
        assert (lua["gpus_per_node"], lua["heartbeat_s"]) == (str(config.gpus_per_node), str(config.heartbeat_s))

    @pytest.mark.parametrize(
        "generated",
        ["", "# nothing\n", "Partitions=gpu", "nonsense", "NoSuchKey=1\nGpusPerNode=2", "SlurmUser=\nGpusPerNode=0"],
    )
    def test_a_damaged_one_is_a_mistake(self, readers: Readers, generated: str) -> None:
        with pytest.raises(ConfigError, match=r"gpushare\.generated\.conf"):
            parse_config("Partitions=gpu", generated=generated)
        assert readers.shell("Partitions=gpu", generated) is None
        assert readers.lua("Partitions=gpu", generated) is None

    def test_a_key_that_moved_is_a_warning_with_its_new_place(self) -> None:
        alone = parse_config("Partitions=gpu\nSlurmVersion=22.05.8").warnings
        assert alone == (
            "gpushare.conf:2: SlurmVersion is worked out by 'gpushare configure --write' now, into a file beside it "
            "(*.generated.conf); obeyed",
        )
        (beside,) = parse_config("SlurmVersion=22.05.8", generated="SlurmVersion=24.11.5").warnings
        assert beside.endswith("this line counts no more")

    def test_another_value_than_the_constant_is_obeyed_with_a_warning(self) -> None:
        config = parse_config("PauseMost=40\nMemoryHeadroom=5")
        assert (config.pause_most_pct, config.memory_headroom_pct) == (40.0, 5.0)
        assert config.warnings == (
            "gpushare.conf:1: PauseMost is 25 everywhere now; PauseMost=40 is obeyed for two more releases",
            "gpushare.conf:2: MemoryHeadroom is 5 everywhere now; MemoryHeadroom=5 has no effect",
        )

    def test_what_a_site_sets_warns_of_nothing(self) -> None:
        site = [key for key in KEYS if key.place is Place.SITE]
        assert parse_config("".join(f"{key.name}={key.default}\n" for key in site)).warnings == ()
        assert len(site) <= 26

    def test_the_last_good_settings_have_both_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        conf = tmp_path / "gpushare.conf"
        monkeypatch.setenv("GPUSHARE_CONF", str(conf))
        monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(tmp_path / "gpushare.conf.good"))
        conf.write_text("Partitions=gpu\nSlurmUser=old # of the site\nPauseMost=40\n")
        generated_path(conf).write_text("SlurmUser=new\n")
        good = settings_in_force()
        assert "PauseMost is 25 everywhere now" in caplog.text
        for broken in (conf, generated_path(conf)):
            text = broken.read_text()
            broken.write_text("")
            assert settings_in_force() == good
            assert good.slurm_user == "new"
            done = subprocess.run(
                ["bash", "-c", f'. {ROOT}/prolog/common.sh; gs_read_conf && echo "$gs_partitions $gs_slurmuser"'],
                capture_output=True, text=True, check=False, timeout=30,
            )  # fmt: skip
            assert done.stdout == "gpu new\n"
            broken.write_text(text)


def test_every_reader_knows_every_key(readers: Readers) -> None:
    for key in KEYS:
        assert readers.shell(f"{key.name}={key.default}") is not None
        assert readers.lua(f"{key.name}={key.default}") is not None


class TestTheLastGoodSettings:
    @pytest.fixture
    def conf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        conf = tmp_path / "gpushare.conf"
        conf.write_text("Partitions=gpu\nTickSeconds=7\n")
        monkeypatch.setenv("GPUSHARE_CONF", str(conf))
        monkeypatch.setenv("GPUSHARE_LAST_GOOD", str(tmp_path / "lib" / "gpushare.conf.good"))
        return conf

    @pytest.mark.parametrize("fault", ["a bad line", "away", "not UTF-8", "emptied", "a directory", "a pipe"])
    def test_they_stay_in_force_and_it_is_said(self, conf: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
        settings_in_force()
        if fault in ("away", "a directory", "a pipe"):
            conf.unlink()
        if fault == "a directory":
            conf.mkdir()
        elif fault == "a pipe":
            os.mkfifo(conf)
        elif fault != "away":
            conf.write_bytes(
                {"a bad line": b"Partitions=gpu\nTickSecond=7\n", "not UTF-8": b"Policy=\xff\n"}.get(fault, b"")
            )
        found = settings_in_force()
        assert (found.partitions, found.tick_s, found.source) == (("gpu",), 7.0, conf)
        assert "the last good settings stay in force" in caplog.text
        assert str(conf) in caplog.text

    def test_without_any_it_is_an_error(self, conf: Path) -> None:
        conf.write_text("TickSecond=7\n")
        with pytest.raises(ConfigError):
            settings_in_force()

    def test_a_mended_file_counts_again(self, conf: Path, caplog: pytest.LogCaptureFixture) -> None:
        settings_in_force()
        conf.write_text("nonsense")
        settings_in_force()
        conf.write_text("Partitions=gpu\nTickSeconds=9\n")
        caplog.set_level(logging.INFO)
        caplog.clear()
        assert settings_in_force().tick_s == 9.0
        assert caplog.text == ""

    def test_another_site_s_settings_are_not_taken(self, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        settings_in_force()
        monkeypatch.setenv("GPUSHARE_CONF", str(conf.with_name("other.conf")))
        with pytest.raises(ConfigError):
            settings_in_force()

    def test_a_copy_is_no_more_public_than_its_file(self, conf: Path, tmp_path: Path) -> None:
        conf.chmod(0o640)
        settings_in_force()
        assert (tmp_path / "lib" / "gpushare.conf.good").stat().st_mode & 0o777 == 0o640

    @pytest.mark.parametrize(
        "text", [None, "nonsense\n", "Partitions=gpu\nStateDir=relative\n", "", "# all of it\n", "a pipe"]
    )
    def test_the_prolog_and_the_epilog_take_them_too(self, conf: Path, tmp_path: Path, text: str | None) -> None:
        conf.write_text(f"Partitions=gpu\nStateDir={tmp_path}/state\n")
        settings_in_force()
        if text in (None, "a pipe"):
            conf.unlink()
        if text == "a pipe":
            os.mkfifo(conf)
        elif text is not None:
            conf.write_text(text)
        done = subprocess.run(
            ["bash", "-c", f'. {ROOT}/prolog/common.sh; gs_read_conf && echo "$gs_partitions $gs_statedir"'],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        assert done.stdout == f"gpu {tmp_path}/state\n"
