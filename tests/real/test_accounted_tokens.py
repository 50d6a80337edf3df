"""Tokens of jobs that have ended are taken out of accounting, where everybody could link a user's runs by them."""

from __future__ import annotations

import time

import pytest
from gpushare_lab.testbed.processes import wait_until
from gpushare_lab.testbed.testbed import Testbed
from helper_kit import TOKENS, Site

from slurm_gpushare.helper import housekeeping
from slurm_gpushare.helper.housekeeping import AccountedTokens, job_tokens
from slurm_gpushare.slurm.commands import connect

JOBSTATS = "JS1:H4sIAAAAAAAAA6tWKkktLlGyUlAqS00sUrKqBQBnRS0iEQAAAA=="


def test_they_go_once_the_store_knows_them_and_other_tools_text_stays(
    testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "SETTLED_AFTER_S", -5.0)
    site = Site(testbed)

    def comments() -> dict[str, str]:
        asked = ["sacct", "-X", "-n", "-P", "-o", "JobIDRaw,AdminComment", "-j", ",".join(jobs)]
        return dict(line.split("|", 1) for line in testbed.run(asked).stdout.splitlines() if "|" in line)

    with site.environment():
        jobs = [site.submit(number, script="exec true") for number in range(3)]
        daemon = site.daemon("fcfs")
        assert wait_until(lambda: daemon.once() is not None and len(connect().jobs()) == 0, 120)
        assert wait_until(lambda: sum("t=gs-" in text for text in comments().values()) == 3, 60), comments()
        site.store.counters.put(housekeeping.TOKENS_OUT_TO, int(time.time()) - 3600)  # it begins KeepDays ago
        if not connect().release.can("keeps_small_and_capital"):
            AccountedTokens(site.store, connect()).take_out(7, time.time())
            assert sum("GS1:" in text and "t=gs-" in text for text in comments().values()) == 3, "left as they were"
            return
        # A site's note, and jobstats, which replaces what is there: here a hook of the site's put it beside ours.
        before = comments()
        connect().set_accounted_comment([int(jobs[1])], f"a, note {before[jobs[1]]}")
        connect().set_accounted_comment([int(jobs[2])], f"{before[jobs[2]]} {JOBSTATS}")
        AccountedTokens(site.store, connect()).take_out(7, time.time())
        after = comments()
        assert not [text for text in after.values() if "t=gs-" in text], after
        assert after[jobs[0]].startswith("GS1:c=")
        assert after[jobs[1]].startswith("a, note GS1:c=")
        assert after[jobs[2]] == JOBSTATS, "alone, as its readers want it"
        tags = job_tokens(connect(), site.store)
        tags.take([])
        found = tags.resolve([int(job) for job in jobs])
        assert [found[int(job)].token for job in jobs] == TOKENS[:3], "a record that comes late counts all the same"
