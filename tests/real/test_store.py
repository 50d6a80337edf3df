"""From sbatch to profile on a real Slurm: what arrives in the store, and what must not."""

from __future__ import annotations

import json
import pwd
import subprocess
import time
from collections.abc import Iterator

import pytest
from gpushare_lab.experiment.submitting import submit
from gpushare_lab.testbed.testbed import Testbed
from telemetry_bed import WAIT_TO_BE_MEASURED, begin_when_measured, ingest_until

from slurm_gpushare.protocol.record import RecordKind, Scope, encode_record, parse_record
from slurm_gpushare.protocol.settings import load_config
from slurm_gpushare.store import Store
from slurm_gpushare.store.hookfile import HookFile

WORKLOAD = "python -m gpushare_lab.job.workload --gpu-util 60 --mem-access 30 --mem-mib 4000 --work-s 4"
USER = "games"


@pytest.fixture
def store(testbed: Testbed) -> Iterator[Store]:
    """An empty store, and a helper that seems alive, so that the hook tags jobs."""
    testbed.run(["gpushare", "db", "migrate"])
    config = load_config(testbed.layout.gpushare_conf)
    with Store(config.store_url) as store:
        HookFile(config.hook_file).sync(store, now_s=time.time())
        yield store


def run_probe(testbed: Testbed, *options: str, script: str = WORKLOAD) -> tuple[str, int]:
    """A job that is measured from its beginning: its token and its id."""
    token = testbed.run(["gpushare", "token", "mynet"], user=USER).stdout.strip()
    home = testbed.layout.home / USER
    options = ("--gres=gpu:1", f"--comment=gpushare:{token}", "--output=%j.out", *options)
    job = submit(testbed, f"{WAIT_TO_BE_MEASURED}; {script}", *options, user=USER, cwd=home)
    begin_when_measured(testbed, job, USER)
    return token, job


def test_a_probed_job_becomes_the_profile_of_its_token(testbed: Testbed, store: Store) -> None:
    token, job = run_probe(testbed)
    ingest_until(testbed, "counted")
    profile = store.profiles.get(token)
    assert profile is not None
    assert (profile.owner_uid, profile.gpu_model, profile.runs) == (pwd.getpwnam(USER).pw_uid, "V100", 1)
    assert profile.features["mgup"] == pytest.approx(60, abs=3)
    assert profile.features["mgtsamp"] == pytest.approx(30, abs=3)
    assert profile.mem_used_mib == 4000
    (run,) = store.runs.of_tokens([token])
    assert (run.job_id, run.by_node, run.shared_s) == (job, True, 0)


def test_the_store_holds_no_name_path_argument_or_user_of_the_job(testbed: Testbed, store: Store) -> None:
    secret = "hushhush"
    script = f"export {secret}_env=1; echo {secret}-arg; {WORKLOAD}"
    token, _ = run_probe(
        testbed, f"--job-name={secret}", f"--error={secret}-%j.err", f"--wckey={secret}", script=script
    )
    ingest_until(testbed, "counted")
    files = sorted(str(path) for path in testbed.layout.gpushare.glob("store.sqlite*"))
    found = subprocess.run(["strings", "-n", "4", *files], capture_output=True, text=True, check=True).stdout
    assert token in found
    for word in (secret, "mynet", USER, str(testbed.layout.home), "--work-s"):
        assert word not in found, word


def test_a_job_without_a_token_leaves_nothing_but_a_count(testbed: Testbed, store: Store) -> None:
    home = testbed.layout.home / USER
    job = submit(testbed, WORKLOAD, "--gres=gpu:1", "--output=%j.out", user=USER, cwd=home)
    ingest_until(testbed, "untokened")
    assert store.runs.of_job(job) == []
    assert list(store.profiles.all()) == []


def test_a_user_without_rights_cannot_write_another_users_profile(testbed: Testbed, store: Store) -> None:
    token, _ = run_probe(testbed)
    ingest_until(testbed, "counted")
    (run,) = store.runs.of_tokens([token])
    genuine = store.runs.record(run.id)
    assert genuine is not None
    body = json.loads(encode_record(genuine))
    body["features"]["mgup"] = 1.0
    forged = {
        "node": body | {"run_id": "0" * 32},
        "user": body
        | {"run_id": "1" * 32, "scope": Scope.COMMAND.value, "token": token, "kind": RecordKind.FINAL.value},
    }
    incoming = testbed.layout.gpushare / "spool" / "incoming"
    for name, content in forged.items():
        parse_record(json.dumps(content))  # well-formed: only the author is wrong
        path = incoming / f"forged-{name}.rec"
        testbed.run(["munge", f"--output={path}", f"--string={json.dumps(content)}"], user="nobody")
    done = ingest_until(testbed, "foreign")
    assert (done["rejected"], done["foreign"]) == (1, 1)
    profile = store.profiles.get(token)
    assert profile is not None
    assert profile.runs == 1
    assert profile.features["mgup"] == pytest.approx(60, abs=3)
