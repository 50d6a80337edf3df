"""A job in a container is measured like any other. bubblewrap stands in for Apptainer, which Debian does not have."""

from __future__ import annotations

import shlex

import pytest
from gpushare_lab.experiment.submitting import wait_for
from gpushare_lab.testbed.testbed import Testbed
from telemetry_bed import assert_features, final_records, output, start_measured, workload

from slurm_gpushare.protocol.record import Closed

pytestmark = pytest.mark.usefixtures("raw_shards")


def test_a_job_in_a_container_is_measured_and_tells_of_its_epoch_where_the_file_is_mounted(testbed: Testbed) -> None:
    if testbed.run(["which", "bwrap"], check=False).returncode:
        pytest.skip("this Debian has no bubblewrap")
    emu = shlex.quote(str(testbed.layout.emu))
    container = f'bwrap --ro-bind / / --dev /dev --proc /proc --bind {emu} {emu} --bind "$PWD" "$PWD"'
    epoch = '--bind "$GPUSHARE_EPOCH_FILE" "$GPUSHARE_EPOCH_FILE"'
    script = (
        f'{container} touch "$GPUSHARE_EPOCH_FILE" || echo refused\n'
        f"{container} {epoch} sh -c ': >\"$GPUSHARE_EPOCH_FILE\"' || echo no device\n"
        f"{container} {epoch} {workload(40, 10, 1024, work_s=8, epochs=2)}\n"
    )
    job = start_measured(testbed, script, "--comment=gpushare:gs-epochsepochsepochs22")
    record = final_records(testbed)[job]
    wait_for(testbed, job, ["COMPLETED"])
    said = output(testbed, job)
    assert "refused" in said, "a file that is not mounted for writing cannot be touched"
    assert "no device" in said, "mounts of users know no devices: the file is touched, not written"
    assert record.closed is Closed.EPOCH
    assert_features(record, 40, 100 * 1024 / 16384, 10)
