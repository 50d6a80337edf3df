"""Whatever Slurm, users or files say: parsers answer or refuse in their own words, and never raise anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_gpushare.knowledge.tables import read_pairs, read_profiles
from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.release import Release
from slurm_gpushare.slurm.accounting import parse_accounting, parse_limits
from slurm_gpushare.slurm.nodes import parse_config, parse_nodes, parse_partitions, parse_reservations
from slurm_gpushare.slurm.queue import QueueReader, parse_queue
from slurm_gpushare.slurm.values import Gres, expand, expand_tasks, parse_gres, parse_used, type_index, typed_shards
from slurm_gpushare.whatif.traces import read_jobs

DELIMITER = "~00000000~"
MARK = "~11111111~"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
RELEASES = {"22.05": Release(22, 5, 8), "24.11": Release(24, 11, 5), "26.05": Release(26, 5, 5)}
PARSERS: dict[str, Callable[[str, Release], object]] = {
    "squeue": lambda text, _: parse_queue(text, DELIMITER),
    "sinfo": lambda text, release: parse_nodes(text, DELIMITER, release),
    "sacct": lambda text, _: parse_accounting(text, DELIMITER, MARK),
    "config": lambda text, _: parse_config(text),
    "partitions": lambda text, _: parse_partitions(text),
    "reservations": lambda text, _: parse_reservations(text),
}
ODD = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "N/A", "UNLIMITED", "(null)", "-1", "1e9", "99999999999999999999", "1-2-3", "a=b=c", "[",
                     "n[1-", "n[3-1]", "n[1-99999999999]", "gpu:v100_0:1(IDX:", "gres/shard:0", "\x00", "1:2:3:4:5",
                     "NONE"]),
)  # fmt: skip


@pytest.mark.parametrize("question", PARSERS)
@settings(max_examples=120)
@given(data=st.data())
def test_a_damaged_answer_is_read_or_refused(question: str, data: st.DataObject) -> None:
    """What a release really printed, with some of it cut off, replaced, doubled or filled with what users write."""
    name = data.draw(st.sampled_from(sorted(RELEASES)))
    text = (FIXTURES / name / f"{question}.txt").read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 60)))
    damaged = data.draw(st.sampled_from(["replaced", "cut", "doubled", "field"]))
    if damaged == "replaced":
        text = text[:start] + data.draw(ODD) + text[end:]
    elif damaged == "cut":
        text = text[:start]
    elif damaged == "doubled":
        text = text[:end] + text[start:end] + text[end:]
    else:
        fields = text.split(DELIMITER)
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(ODD)
        text = DELIMITER.join(fields)
    try:
        PARSERS[question](text, RELEASES[name])
        if question == "squeue":
            assert QueueReader().parse(text, DELIMITER) == parse_queue(text, DELIMITER)
    except GpushareError:
        return


@pytest.mark.parametrize("question", PARSERS)
@given(text=st.text(max_size=200))
def test_garbage_is_read_or_refused(question: str, text: str) -> None:
    try:
        PARSERS[question](text, RELEASES["24.11"])
    except GpushareError:
        return


@given(st.text(max_size=60))
@example("gpu:1T")
@example("shard:v100_99999999999999:1")
@example("gres/gpu:" + "9" * 5000)
def test_no_gres_string_raises(value: str) -> None:
    for gres in parse_gres(value):
        assert gres.count >= 0
        type_index(gres.type)
    typed_shards(value)
    parse_used(value, exact=True)
    parse_limits("qos", value)


NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,6}", fullmatch=True)
GRES = st.builds(Gres, NAMES, st.one_of(st.just(""), NAMES), st.integers(0, 10**6))


@given(st.lists(GRES, max_size=5), st.sampled_from(["", "gres:", "gres/"]))
def test_what_is_written_as_gres_is_read_as_such(items: list[Gres], prefix: str) -> None:
    assert parse_gres(",".join(f"{prefix}{item}" for item in items)) == tuple(items)


@given(st.sets(st.integers(0, 300), max_size=30))
def test_array_tasks_are_told_apart_whatever_their_steps(tasks: set[int]) -> None:
    ordered = sorted(tasks)
    ranges = ",".join(map(str, ordered))
    assert expand_tasks(ranges) == tuple(ordered) if ordered else True
    if len(ordered) > 2:
        step = ordered[1] - ordered[0]
        last = ordered[0] + 7 * step
        assert expand_tasks(f"[{ordered[0]}-{last}:{step}%3]") == tuple(range(ordered[0], last + 1, step))


def test_no_list_of_array_tasks_takes_the_memory_of_the_machine() -> None:
    """Each range is one that Slurm could have; all of them together are not."""
    with pytest.raises(ValueError, match="too many"):
        expand_tasks(",".join(["0-4000000"] * 1000))


@given(st.text("gpu0123456789[]-,", max_size=20))
@example("n[1-99999999999]")
def test_no_host_list_takes_the_memory_of_the_machine(expression: str) -> None:
    try:
        assert len(expand(expression)) <= 200_000
    except GpushareError:
        return


FIELDS = st.one_of(ODD, st.sampled_from(["V100", "0.5", "1", "nan", "inf", "-0.1", "1e308", '"', "a,b", "profile"]))


@pytest.mark.parametrize(
    ("read", "header"),
    [
        (read_profiles, "profile,gpu_model,gpu_util_mean_pct,mem_access_mean_pct,mem_used_mib,mem_total_mib"),
        (read_pairs, "profile_a,profile_b,gpu_model,feasible,rate_a,rate_b"),
        (read_jobs, "submit_s,duration_s,num_gpus,group"),
    ],
)
@settings(max_examples=60)
@given(data=st.data())
def test_an_imported_file_is_read_or_refused(
    read: Callable[[Path], object], header: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = data.draw(st.lists(st.sampled_from([*header.split(","), "extra"]), max_size=8)) or header.split(",")
    rows = data.draw(st.lists(st.lists(FIELDS, max_size=8), max_size=4))
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_bytes("\n".join(map(",".join, [names, *rows])).encode("utf-8", "surrogatepass"))
    try:
        read(path)
    except GpushareError:
        return
