"""Coverage-guided fuzzing of every parser at the edge with atheris, which is not among our requirements.

``fuzz_parsers.py SECONDS [PARSER...]`` gives each parser so long; exit code 3 where one raised anything but its own
refusal, was slow, or took much memory. atheris leaves that input in the current directory, as ``crash-...``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["slurm_gpushare"]):
    from slurm_gpushare.knowledge.tables import read_pairs, read_profiles
    from slurm_gpushare.protocol.errors import Exit, GpushareError
    from slurm_gpushare.protocol.record import encode_record, parse_record
    from slurm_gpushare.protocol.release import Release
    from slurm_gpushare.protocol.settings import parse_config as parse_settings
    from slurm_gpushare.protocol.tag import parse_tag, with_tag
    from slurm_gpushare.slurm.accounting import parse_accounting, parse_limits
    from slurm_gpushare.slurm.nodes import parse_config, parse_nodes, parse_partitions, parse_reservations
    from slurm_gpushare.slurm.queue import QueueReader, parse_queue
    from slurm_gpushare.slurm.values import expand, expand_tasks, parse_gres, parse_used, type_index, typed_shards
    from slurm_gpushare.whatif.traces import read_jobs

TOP = Path(__file__).resolve().parents[1]
FIXTURES = TOP / "tests" / "fixtures" / "slurm"
DELIMITER, MARK = "~00000000~", "~11111111~"
NEW, OLD = Release(24, 11, 5), Release(22, 5, 8)
SLOW_S, MUCH_MIB = 10, 2048


def gres(text: str) -> None:
    for item in parse_gres(text):
        assert item.count >= 0
        type_index(item.type)
    typed_shards(text)
    parse_used(text, exact=True)
    parse_used(text, exact=False)


def squeue(text: str) -> None:
    found = parse_queue(text, DELIMITER)
    assert QueueReader().parse(text, DELIMITER) == found


def sinfo(text: str) -> None:
    for release in (NEW, OLD):
        parse_nodes(text, DELIMITER, release)


def scontrol(text: str) -> None:
    for parse in (parse_config, parse_partitions, parse_reservations):
        try:
            parse(text)
        except GpushareError:
            continue


def tag(text: str) -> None:
    if (found := parse_tag(text)) is not None:
        assert parse_tag(with_tag("", found)) == found, "what we write we read"


def record(text: str) -> None:
    encode_record(parse_record(text.encode("utf-8", "surrogatepass")))


def tasks(text: str) -> None:
    try:
        expand_tasks(text)
    except ValueError:  # its own refusal: its callers know it
        return


def csv(read: Callable[[Path], object]) -> Callable[[str], None]:
    def parse(text: str) -> None:
        FILE.write_bytes(text.encode("utf-8", "surrogatepass"))
        read(FILE)

    return parse


FILE = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}.csv"
PARSERS: dict[str, Callable[[str], object]] = {
    "gres": gres,
    "squeue": squeue,
    "sinfo": sinfo,
    "sacct": lambda text: parse_accounting(text, DELIMITER, MARK),
    "sacctmgr": lambda text: [parse_limits(kind, text) for kind in ("qos", "assoc")],
    "scontrol": scontrol,
    "tag": tag,
    "hosts": expand,
    "tasks": tasks,
    "records": record,
    "settings": parse_settings,
    "profiles": csv(read_profiles),
    "pairs": csv(read_pairs),
    "traces": csv(read_jobs),
}


def seeds(name: str) -> Iterator[str]:
    """Inputs to begin with: what releases really printed, and one of each file."""
    for path in sorted(FIXTURES.glob("*/*.txt")):
        if path.stem == name or (name == "scontrol" and path.stem in ("config", "partitions", "reservations")):
            yield path.read_text()
            yield "\n".join(path.read_text().splitlines()[:2])
    small = {
        "gres": ["gres/gpu:v100:2,shard:v100_0:1", "gpu:v100_0:1(IDX:0),shard:v100_0:1(1/2,0/2)"],
        "tag": ["GS1:c=2;t=gs-aaaaaaaaaaaaaaaaaaaa;o=gpu:1;l=1;g=n0:1", "mine GS1:c=0;o=shard:2;k=2"],
        "hosts": ["n[1-3,07],gpu0", "rack[1-2]n[01-03]"],
        "tasks": ["[1-9:2%3],12", "0-4"],
        "settings": ["Partitions=gpu\nGpusPerNode=2 # two\nLeaseSeconds=30\nEpilogHold=0.5\nStoreUrl=sqlite:////x"],
        "profiles": ["profile,gpu_model,gpu_util_mean_pct,mem_access_mean_pct,mem_used_mib,mem_total_mib\n"
                     "a,V100,50,20,2048,16384\n"],
        "pairs": ["profile_a,profile_b,gpu_model,feasible,rate_a,rate_b\na,b,V100,1,0.8,0.9\n"],
        "traces": ["submit_s,duration_s,num_gpus,group\n0,60,1,a\n", '[{"jobid": "a", "attempts": []}]'],
        "records": [RECORD],
        "sacctmgr": ["normal|gres/gpu=4|cpu=2|\n"],
    }  # fmt: skip
    yield from small.get(name, [])


def _record() -> str:
    from slurm_gpushare.protocol.record import Closed, Features, Period, Record, RecordKind, Scope, Stat, new_id

    period = Period(300.0, 0.0, {"gpu_util_pct": Stat(500, 3.0, 3.0, 3.0, 3.0, 0.0)})
    features = Features(3.0, 2.0, 1.0, 3.0, 1.0, 300.0, 16384.0)
    return encode_record(
        Record(new_id(), new_id(), 1, RecordKind.FINAL, Scope.COMMAND, 1, "gpu0", 0, "V100", 100.0, 400.0, Closed.END,
               features, period, Period(300.0, 0.0), Period(), (), "gs-" + "a" * 20)
    )  # fmt: skip


RECORD = _record()


def fuzz(name: str, seconds: int) -> None:
    """This parser alone, in this process, which ends with it."""
    parse = PARSERS[name]

    def once(data: bytes) -> None:
        try:
            parse(data.decode("utf-8", "replace"))
        except GpushareError:
            return

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(name)):
            Path(corpus, str(number)).write_text(seed)
        limits = [f"-max_total_time={seconds}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MUCH_MIB}", "-max_len=20000"]
        atheris.Setup([sys.argv[0], *limits, "-print_final_stats=1", corpus], once)
        atheris.Fuzz()


def main(seconds: int, names: list[str]) -> int:
    bad = 0
    for name in names or list(PARSERS):
        done = subprocess.run([sys.executable, __file__, "--one", name, str(seconds)], capture_output=True, text=True)
        runs = next((line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line), "?")
        print(f"{name:10} {runs:>9} inputs, {'nothing found' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            bad += 1
            print(done.stderr[-3000:], flush=True)
    return Exit.PROBLEMS if bad else Exit.OK


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
