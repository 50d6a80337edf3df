"""Doctor on a real site: healthy, then with one thing after another broken."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator

import pytest
from gpushare_lab.testbed.configuration import with_keys
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.settings import Config, load_config
from slurm_gpushare.store.hookfile import HookFile
from slurm_gpushare.store.store import Store

Findings = dict[str, dict[str, str]]


def doctor(testbed: Testbed, *options: str, **env: str) -> Findings:
    """Findings by check; the worst one where a check has several."""
    command = [sys.executable, "-m", "slurm_gpushare", "doctor", "--json", *options]
    done = testbed.run(command, check=False, env=env, timeout_s=300)  # each command waits for a daemon that is away
    assert done.returncode in {0, 3}, done.stderr
    found: Findings = {}
    for finding in json.loads(done.stdout):
        if found.get(finding["check"], {}).get("level") != "fail":
            found[finding["check"]] = finding
    assert (done.returncode == 3) == any(finding["level"] == "fail" for finding in found.values())
    return found


def failures(found: Findings) -> set[str]:
    return {check for check, finding in found.items() if finding["level"] == "fail"}


@pytest.fixture
def config(testbed: Testbed) -> Config:
    """A site in order: a store, the hook's file, a heart that beats."""
    config = load_config(testbed.layout.gpushare_conf)
    with Store.create(config.store_url) as store:
        HookFile(config.hook_file).sync(store)
    return config


@pytest.fixture
def limits(testbed: Testbed) -> Iterator[None]:
    """Limits and an account that know GPUs and not shards."""
    testbed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "GrpTRES=gres/gpu=8"])
    yield
    testbed.run(["sacctmgr", "-i", "modify", "qos", "normal", "set", "GrpTRES=gres/gpu=-1,gres/shard=-1"])


def test_a_site_in_order_has_no_failure(testbed: Testbed, config: Config) -> None:
    found = doctor(testbed)
    assert failures(found) == set()
    assert found["hook"]["level"] == found["cli-filter"]["level"] == "pass"
    assert "other has shared nodes" in found["other-partition"]["found"]


def test_what_slurm_conf_lacks_is_named(testbed: Testbed, config: Config) -> None:
    testbed.configure(
        slurm={
            "AccountingStorageTRES": "gres/gpu",
            "JobSubmitPlugins": "",
            "CliFilterPlugins": "",
            "Prolog": "/bin/true",
            "Epilog": "",
            "TaskProlog": "/bin/true",
            "PriorityWeightTRES": "gres/gpu=100",
        }
    )
    expected = {"accounting-tres", "hook", "prolog", "epilog", "task-prolog", "priority", "tag"}
    # 22.05 shows no shards until the nodes have told a restarted slurmctld of them.
    wait_until(lambda: failures(doctor(testbed)) == expected, 60)
    found = doctor(testbed)
    assert failures(found) == expected
    assert found["cli-filter"]["level"] == "warn"
    assert all(found[check]["fix"] for check in failures(found))


def test_what_gpushare_conf_has_wrong_is_named(testbed: Testbed, config: Config) -> None:
    path = testbed.layout.gpushare_conf
    text = path.read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("SlurmVersion", "GpusPerNode", "GpuModel"))]
    path.write_text("\n".join([*lines, "SlurmVersion=21.08.1", "GpuModel=a100", "DefCpuPerGpu=gpu:8", ""]))
    expected = {"SlurmVersion", "partitions", "DefCpuPerGpu"}
    assert failures(doctor(testbed)) == expected
    path.write_text("\n".join([*lines, "GpusPerNode=1", ""]))
    assert "GpusPerNode" in failures(doctor(testbed)), "less than a node has"
    path.write_text("\n".join([*lines, "GpusPerNode=8", ""]))
    assert "GpusPerNode" in failures(doctor(testbed)), "more than any node has"
    path.write_text(text.replace("Partitions=gpu", "Partitions=gone"))
    assert "partitions" in failures(doctor(testbed))
    path.write_text("Leese=3\n")
    assert failures(doctor(testbed)) == {"gpushare.conf"}
    path.unlink()
    assert failures(doctor(testbed)) == {"gpushare.conf"}


def test_files_beside_slurm_conf_are_read(testbed: Testbed, config: Config) -> None:
    etc = testbed.layout.etc
    (etc / "gres.conf").write_text((etc / "gres.conf").read_text().replace("AutoDetect=off", "AutoDetect=nvml"))
    (etc / "job_submit.lua").write_text("function slurm_job_submit() return slurm.SUCCESS end\n")
    (etc / "cgroup.conf").write_text("ConstrainDevices=no\n")
    (etc / "cli_filter.lua").unlink()
    found = doctor(testbed)
    assert failures(found) == {"autodetect", "hook", "cli-filter"}
    assert "does not call us" in found["hook"]["found"]
    assert "is missing" in found["cli-filter"]["found"]
    assert found["constrain-devices"]["level"] == "warn"
    (etc / "job_submit.lua").write_text(f'pcall(dofile, "{etc}/gpushare_submit.lua")\n')
    assert "gpushare_submit.lua, which is missing" in doctor(testbed)["hook"]["found"]


def test_a_line_that_is_commented_out_and_a_hook_that_does_not_run_are_named(testbed: Testbed, config: Config) -> None:
    """Names alone look right: our script lies there whole, and slurmctld runs with another."""
    etc = testbed.layout.etc
    assert doctor(testbed)["tag"]["level"] == "pass"
    (etc / "gpushare_submit.lua").write_text((etc / "job_submit.lua").read_text())
    run_ours = f'pcall(dofile, "{etc}/gpushare_submit.lua")\n'
    theirs = "function slurm_job_submit(d, p, u) {} return slurm.SUCCESS end\n"
    modify = "function slurm_job_modify(d, r, p, u) return slurm.SUCCESS end\n"
    (etc / "job_submit.lua").write_text(f"{theirs.format('')}{modify}-- {run_ours}")
    testbed.restart("slurmctld")
    found = doctor(testbed)
    assert {"hook", "tag"} <= failures(found)
    assert "in a comment" in found["hook"]["found"]
    later = "local ours = slurm_job_submit\n" + theirs.format("ours(d, p, u); d.admin_comment = 'site'")
    (etc / "job_submit.lua").write_text(f"{theirs.format('')}{modify}{run_ours}{later}")
    testbed.restart("slurmctld")
    found = doctor(testbed)
    assert {"hook", "tag"} <= failures(found)
    assert "overwritten" in found["hook"]["found"]
    assert "its AdminComment is 'site'" in found["tag"]["found"]
    assert testbed.run(["squeue", "-h", "-a", "-o", "%i"]).stdout == "", "no job of doctor's is left"


def test_nodes_that_differ_or_are_away_are_named(testbed: Testbed, config: Config) -> None:
    """Four shards a card on one node, and one whose slurmd does not start."""
    etc = testbed.layout.etc
    testbed.stop("slurmd-gpu1")
    lines = testbed.layout.slurm_conf.read_text().splitlines()
    testbed.layout.slurm_conf.write_text(
        "\n".join(line.replace("shard:4", "shard:8") if line.startswith("NodeName=gpu0 ") else line for line in lines)
    )
    gres = (etc / "gres.conf").read_text()
    (etc / "gres.conf").write_text(gres.replace("NodeName=gpu0 Name=shard Count=4", "NodeName=gpu0 Name=shard Count=8"))
    for daemon in ("slurmctld", "slurmd-gpu0"):
        testbed.restart(daemon)
    testbed.run(["scontrol", "update", "NodeName=gpu1", "State=DOWN", "Reason=slurmd died: gres.conf"])
    assert wait_until(lambda: "shards" in failures(doctor(testbed)), 60)
    found = doctor(testbed)
    assert "GPU 0 has 4 shards" in found["shards"]["found"]
    assert "gpu1 is down (slurmd died: gres.conf)" in found["nodes"]["found"]
    assert found["nodes"]["level"] == "fail"


def test_what_only_the_values_say_is_named(testbed: Testbed, config: Config) -> None:
    conf = testbed.layout.slurm_conf
    conf.write_text(conf.read_text().replace("PartitionName=gpu ", "PartitionName=gpu OverSubscribe=FORCE:4 "))
    prolog = testbed.layout.etc / "prolog.sh"
    prolog.write_text("#!/bin/sh\nexport GPUSHARE_PYTHON=/opt/gone/python\n" + prolog.read_text())
    prices = {"PriorityWeightTRES": "gres/gpu=100,gres/shard=0", "PrologFlags": "", "SelectTypeParameters": "CR_Core"}
    testbed.configure(slurm=prices | {"SchedulerParameters": "defer,bf_interval=300", "PreemptMode": "GANG"})
    found = doctor(testbed)
    assert {"priority", "prolog-flags", "partitions", "prolog", "preemption"} <= failures(found)
    assert "/opt/gone/python" in found["prolog"]["found"]
    assert "FORCE:4" in found["partitions"]["found"]
    assert found["select-plugin"]["level"] == found["scheduler"]["level"] == "warn"


def test_scripts_written_for_other_nodes_are_named(testbed: Testbed, config: Config) -> None:
    script = testbed.layout.etc / "job_submit.lua"
    script.write_text(script.read_text().replace("gpu0,gpu1", "gpu0"))
    assert doctor(testbed)["hook"]["level"] == "warn"


def test_a_password_that_everybody_may_read_is_a_failure(testbed: Testbed, config: Config) -> None:
    path = testbed.layout.gpushare_conf
    path.write_text(with_keys(path.read_text(), {"StoreUrl": "mysql+pymysql://gpushare:secret@localhost:1/gpushare"}))
    found = doctor(testbed)
    assert found["store-password"]["level"] == "fail"
    assert "secret" not in found["store-password"]["found"] + found["store-password"]["fix"]
    path.chmod(0o600)
    assert "store-password" not in failures(doctor(testbed))


def test_before_the_first_start_nothing_fails_for_what_the_helper_makes(testbed: Testbed, config: Config) -> None:
    config.hook_file.unlink()
    assert failures(doctor(testbed)) == {"hook-file"}
    found = doctor(testbed, "--first-time")
    assert failures(found) == set()
    assert found["hook-file"]["level"] == "later"


def test_limits_that_sharing_would_slip_past_are_failures(testbed: Testbed, config: Config, limits: None) -> None:
    found = doctor(testbed)
    assert failures(found) == {"limits"}
    assert "qos name=normal" in found["limits"]["found"]
    printed = testbed.run([sys.executable, "-m", "slurm_gpushare", "configure", "-p", "gpu"]).stdout
    fix = next(line for line in printed.splitlines() if line.startswith("sacctmgr"))
    testbed.run([*fix.replace("sacctmgr", "sacctmgr -i", 1).split()])
    assert failures(doctor(testbed)) == set()


def test_a_dead_helper_is_named(testbed: Testbed, config: Config) -> None:
    HookFile(config.hook_file).beat(time.time() - 3600)
    assert failures(doctor(testbed)) == {"heartbeat"}
    config.hook_file.unlink()
    assert failures(doctor(testbed)) == {"hook-file"}


def test_a_store_that_is_open_to_others_or_missing_is_named(testbed: Testbed, config: Config) -> None:
    path = testbed.layout.gpushare / "store.sqlite"
    path.chmod(0o644)
    assert failures(doctor(testbed)) == {"store-mode"}
    for file in testbed.layout.gpushare.glob("store.sqlite*"):
        file.unlink()
    assert failures(doctor(testbed)) == {"store"}


def test_what_others_could_change_is_named(testbed: Testbed, config: Config) -> None:
    places = {testbed.layout.gpushare_conf: 0o666, testbed.layout.etc / "job_submit.lua": 0o646}
    places[config.spool_dir / "incoming"] = 0o1777
    before = {path: path.stat().st_mode & 0o7777 for path in places}
    for path, mode in places.items():
        path.chmod(mode)
    found = doctor(testbed)
    assert failures(found) == {"owners", "script-owners", "spool-mode"}
    assert "in slurmctld" in found["script-owners"]["found"]
    for path in places:
        path.chmod(before[path])
    assert failures(doctor(testbed)) == set()


def test_a_spool_that_nobody_empties_is_named(testbed: Testbed, config: Config) -> None:
    record = config.spool_dir / "incoming" / "gpu0-1-x-f.rec"
    record.touch()
    os.utime(record, (time.time() - 3600, time.time() - 3600))
    assert doctor(testbed)["spool"]["level"] == "warn"
    record.unlink()
    (config.spool_dir / "incoming").rmdir()
    assert failures(doctor(testbed)) == {"spool"}


def test_a_card_that_admits_one_process_only_is_named(testbed: Testbed, config: Config) -> None:
    found = doctor(testbed, GPUSHARE_EMU_NODE="gpu0")
    assert found["nvml"]["level"] == "pass"
    code = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetComputeMode(n.nvmlDeviceGetHandleByIndex(1), 3)"
    testbed.run([sys.executable, "-c", code], env={"GPUSHARE_EMU_NODE": "gpu0"})
    assert failures(doctor(testbed, GPUSHARE_EMU_NODE="gpu0")) == {"compute-mode"}


def test_a_controller_that_does_not_answer_is_named_and_the_rest_still_checked(
    testbed: Testbed, config: Config
) -> None:
    testbed.stop("slurmctld")
    found = doctor(testbed)
    assert failures(found) == {"slurm"}
    assert found["store"]["level"] == "pass"


def test_without_slurmdbd_limits_are_said_to_be_unchecked(testbed: Testbed, config: Config) -> None:
    testbed.stop("slurmdbd")
    found = doctor(testbed)
    assert found["accounting"]["level"] == "warn"
    assert failures(found) == set()
