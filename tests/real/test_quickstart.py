"""The quick start's commands, as a user types them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from gpushare_lab.testbed.testbed import Testbed
from hook_testbed import write_hook_file

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_of_the_quick_start_works_for_an_ordinary_user(testbed: Testbed) -> None:
    write_hook_file(testbed)  # a helper is alive
    home = testbed.layout.home / "games"
    (home / "train.sh").write_text("#!/bin/sh\nsleep 600\n")
    (home / "train.sh").chmod(0o755)
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    own = "$(squeue -h -u games -o %A | head -n 1)"  # where the page has an example's number
    commands = "".join(blocks).replace("4711", own)
    script = f'set -e\nexport HOME="{home}"\ngpushare() {{ "{sys.executable}" -m slurm_gpushare "$@"; }}\n{commands}'
    done = testbed.run(["bash", "-c", script], user="games", cwd=home, check=False, timeout_s=600)  # a dozen commands
    assert done.returncode == 0, done.stderr
    token = done.stdout.splitlines()[0]
    assert re.fullmatch(r"gs2-[a-z2-7]{19}", token)
    assert done.stdout.count("Submitted batch job") == 3
    comments = testbed.run(["squeue", "-h", "-a", "-O", "admin_comment:0"]).stdout
    assert f"GS1:probe;t={token}" in comments
