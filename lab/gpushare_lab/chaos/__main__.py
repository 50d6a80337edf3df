"""``python -m gpushare_lab.chaos``: what ``make chaos`` runs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from gpushare_lab.chaos.books import Books, Line, share
from gpushare_lab.chaos.fault import Fault
from gpushare_lab.chaos.faults import FAULTS, soak
from gpushare_lab.chaos.run import Chaos, ChaosProgress
from gpushare_lab.chaos.site import Vitals
from gpushare_lab.chaos.slurm_faults import crash
from gpushare_lab.chaos.stream import MEAN_S
from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.rootfs import SUITES
from gpushare_lab.testbed.testbed import Testbed
from slurm_gpushare import __version__
from slurm_gpushare.protocol.errors import BadInput, Exit, GpushareError

KILL = "kill -9 of slurmctld"
SOAK_MEAN_S = 6.0
"""How long jobs of a soak work: as many come and go as eight cards can take."""
COLUMNS = ("FAULT", "JOBS", "COMPLETED", "BY FAULT", "LOST", "TWICE", "RECORDS LOST", "EXTRA WAIT",
           "HELPER BACK", "VERDICT")  # fmt: skip


def chosen(words: str) -> list[Fault]:
    """The faults of a list of names or groups; ``all`` is every one but the short forms of others, ``short`` these."""
    if words == "all":
        return [fault for fault in FAULTS if fault.name != "kill -9 of the helper 5 times"]
    if words == "short":
        return [fault for fault in FAULTS if fault.short]
    wanted = [word.strip() for word in words.split(",")]
    known = {word for fault in FAULTS for word in (fault.name, fault.group)}
    if strange := [word for word in wanted if word not in known]:
        raise BadInput(f"--faults: no '{strange[0]}'", f"There are: {', '.join(sorted(known))}.")
    return [fault for fault in FAULTS if fault.name in wanted or fault.group in wanted]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="chaos", description="Real faults while jobs come and go; then the books.")
    parser.add_argument("--faults", default="all", help="all, short, or names and groups with commas between")
    parser.add_argument("--jobs", type=int, default=200, help="at least so many")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two jobs")
    parser.add_argument("--minutes", type=float, default=28.0, help="no fault begins later")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="no fault at all, for so long")
    parser.add_argument("--slurm", choices=list(SUITES), default="trixie")
    parser.add_argument("--dir", type=Path, default=Path("/var/lib/gpushare-chaos"))
    parser.add_argument("--out", type=Path, default=Path("out/chaos.json"))
    options = parser.parse_args(arguments)
    testbed = Testbed(options.dir, progress=lambda text: print(f"  {text}", flush=True))
    begun = time.monotonic()
    try:
        testbed.up(Shape(nodes=4, gpus=2), suite=options.slurm)
        faults = [soak(options.soak)] if options.soak else chosen(options.faults)
        mean_s = SOAK_MEAN_S if options.soak else MEAN_S
        chaos = Chaos(testbed, faults, options.every, options.jobs, _show, mean_s=mean_s, minutes=options.minutes)
        signal.signal(signal.SIGINT, lambda number, frame: setattr(chaos, "enough", True))
        books, vitals = chaos.run()
        control = None
        if books.kills:
            control, _ = Chaos(testbed, _control(len(books.kills)), options.every, 0, _show, sharing=False).run()
            books.control_kills = control.kills
        release = testbed.state.release
    finally:
        testbed.down(purge=True)
    print(f"\n\n{_report(books, vitals, control)}")
    print(f"Slurm {release}, {time.monotonic() - begun:.0f} s")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": __version__, "slurm": release, "seconds": round(time.monotonic() - begun), **books.as_dict(),
                "vitals": [asdict(item) for item in vitals], "control": control and control.as_dict()}  # fmt: skip
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"All figures: {options.out}")
    return Exit.OK if books.sound else Exit.PROBLEMS


def _control(kills: int) -> list[Fault]:
    """What is done to Slurm without us: as many kills, so that what it forgot can be compared."""
    calm = next(fault for fault in FAULTS if fault.name == "nothing")
    killed = Fault(KILL, "slurm", partial(crash, "slurmctld", 3.0))
    return [calm, *(replace(killed, name=f"{KILL}, {number} of {kills}") for number in range(1, kills + 1))]


def _show(progress: ChaosProgress) -> None:
    queue = "no answer"
    if progress.queue is not None:
        queue = ", ".join(f"{count} {state.lower()}" for state, count in sorted(progress.queue.items())) or "empty"
    line = (
        f"[{progress.elapsed_s:5.0f} s] {progress.number:2}/{progress.total} {progress.fault:44.44} "
        f"{progress.submitted:4} jobs | {queue} | helper {'alive' if progress.alive else 'away'}"
    )
    print(f"\r\033[K{line:.160}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def _report(books: Books, vitals: list[Vitals], control: Books | None) -> str:
    rows: list[tuple[str | int, ...]] = [_row(line) for line in books.lines]
    total = [sum(int(str(row[index])) for row in rows) for index in range(1, 7)]
    rows.append(("all", *total, "", "", "sound" if books.sound else "FAILED"))
    if control is not None:
        rows += [(f"without us: {name}", *others, "control") for name, *others, _ in map(_row, control.lines)]
    facts = [
        f"cards over-committed: {_few(books.over_committed)}", f"shards leaked: {_few(books.leaked)}",
        f"times that two jobs shared: {books.spans}, that one was paused: {books.pauses}",
        f"spans left open: {books.open_spans}", f"left suspended: {books.suspended}",
        f"records: {books.records}, counted twice: {_few(books.records_twice)}, lost: {_few(books.lost_records)}",
        f"record and accounting differ in length: {_few(books.disagree)}", f"lost jobs: {_few(books.lost_jobs)}",
    ]  # fmt: skip
    if vitals:
        first, last = vitals[min(2, len(vitals) - 1)], vitals[-1]
        facts.append(
            f"helper: {first.rss_mib:.0f} -> {last.rss_mib:.0f} MiB, {first.files} -> {last.files} files, "
            f"{first.threads} -> {last.threads} threads; growing: {_few(books.grew)}"
        )
    if books.kills:
        facts.append(
            f"ended by Slurm, of the jobs that came, started or ended around a kill -9 of slurmctld: "
            f"{share(books.kills)}, without us {share(books.control_kills)}; more than that explains: "
            f"{_few(books.unexplained)}"
        )
    return "\n".join([_table([COLUMNS, *rows]), *facts])


def _row(line: Line) -> tuple[str | int, ...]:
    return (line.fault, line.jobs, line.completed, line.ended_by_fault, line.lost, line.duplicated, line.records_lost,
            f"{line.longest_extra_wait_s:.0f} s", f"{line.back_s:.0f} s", line.verdict)  # fmt: skip


def _table(rows: Sequence[Sequence[str | int]]) -> str:
    """Columns side by side; numbers to the right."""
    widths = [max(len(str(row[at])) for row in rows) for at in range(len(rows[0]))]

    def cell(at: int, value: str | int) -> str:
        return str(value).ljust(widths[at]) if at in (0, len(widths) - 1) else str(value).rjust(widths[at])

    return "\n".join("  ".join(cell(at, value) for at, value in enumerate(row)).rstrip() for row in rows)


def _few(items: list[str] | list[int]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return f"{len(items)} ({shown}{', ...' if len(items) > 5 else ''})" if items else "0"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GpushareError as error:
        print(f"chaos: error: {error}", file=sys.stderr)
        sys.exit(Exit.FAILURE)
