from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_gpushare.protocol.attributes import ATTRIBUTES
from slurm_gpushare.protocol.record import (
    Closed,
    Features,
    Neighbour,
    Period,
    Record,
    RecordError,
    RecordKind,
    Scope,
    Stat,
    encode_record,
    gpu_model,
    new_id,
    parse_record,
)

STATS = MappingProxyType({"gpu_util_pct": Stat(20, 91.0, 70.0, 3.0, 90.5, 12.0)})

SECRET = "resnet50-imagenet-/home/alice/train.py"


def a_record() -> Record:
    return Record(
        record_id=new_id(),
        run_id=new_id(),
        seq=3,
        kind=RecordKind.FINAL,
        scope=Scope.JOB,
        job_id=4711,
        node="gpu0",
        gpu_index=2,
        gpu_model="V100",
        start_s=1700000000.25,
        end_s=1700000010.5,
        closed=Closed.EPOCH,
        features=Features(mgup=91.0, mgmap=40.0, mgtsamp=33.0, mem_used_mib=6553.6, mem_total_mib=16384.0),
        profile=Period(8.0, 2.0, STATS),
        alone=Period(8.0, 0.0, STATS),
        shared=Period(0.0, 2.0, STATS),
        neighbours=(Neighbour(4712, 2.0),),
    )


def test_a_record_is_one_line_and_comes_back_as_it_was() -> None:
    record = a_record()
    line = encode_record(record)
    assert "\n" not in line
    assert parse_record(line) == record
    assert (record.alone_s, record.shared_s) == (8.0, 2.0)


def places(body: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a JSON document, containers included."""
    children = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [at] * bool(at) + [place for key, value in children for place in places(value, (*at, key))]


BODY = json.loads(encode_record(a_record()))


@pytest.mark.parametrize("smuggled", [SECRET, {SECRET: 1}, [SECRET], True, -1, 1e300, None, "47 11"], ids=repr)
def test_no_foreign_value_fits_anywhere(smuggled: Any) -> None:
    for place in places(BODY):
        body = json.loads(json.dumps(BODY))
        target = body
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = smuggled
        if smuggled is None and (place == ("gpu_model",) or place[:-1] == ("features",)):
            continue  # what was not measured
        with pytest.raises(RecordError) as refusal:
            parse_record(json.dumps(body))
        assert SECRET not in str(refusal.value), place


@pytest.mark.parametrize("place", [place for place in places(BODY) if place[-1] in ("features", "profile", "stats")])
def test_no_additional_field_fits_anywhere(place: tuple[Any, ...]) -> None:
    body = json.loads(json.dumps(BODY))
    target = body
    for key in place:
        target = target[key]
    target[SECRET] = 1
    with pytest.raises(RecordError) as refusal:
        parse_record(json.dumps(body))
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("odd", [True, None, SECRET, [], 10**400, -1, 2**53 + 2, 100.5], ids=repr)
def test_a_statistic_that_is_none_is_refused(number: int, odd: Any) -> None:
    stats: list[Any] = [20, 91.0, 70.0, 3.0, 90.5, 12.0]
    stats[number] = odd
    with pytest.raises(RecordError):
        parse_record(json.dumps(BODY | {"profile": BODY["profile"] | {"stats": {"gpu_util_pct": stats}}}))


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"v": 2}',
        '{"v": true}',
        "[" * 50_000,
        "x" * 70_000,
        b"\xff\xfe",
        encode_record(a_record()).encode("utf-8-sig"),
        encode_record(a_record()).encode("utf-16"),
        encode_record(a_record()).replace('"seq":3', '"seq":3,"seq":3'),
        encode_record(a_record()).replace('"seq":3', '"seq":NaN'),
        encode_record(a_record()).replace('"start_s":1700000000.25', '"start_s":1800000000'),
    ],
    ids=lambda line: repr(line[:12]),
)
def test_what_is_not_exactly_a_record_is_refused(line: str | bytes) -> None:
    with pytest.raises(RecordError):
        parse_record(line)


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.text(max_size=300))
def test_whatever_comes_in_the_refusal_is_the_only_exception(line: str | bytes) -> None:
    with pytest.raises(RecordError):
        parse_record(line)


@pytest.mark.parametrize(
    "changed",
    [{"node": SECRET}, {"gpu_model": "v100; rm"}, {"node": "gpu0\n"}, {"end_s": float("nan")}, {"token": SECRET}],
    ids=repr,
)
def test_writing_checks_too(changed: dict[str, Any]) -> None:
    with pytest.raises((RecordError, ValueError)):
        encode_record(replace(a_record(), **changed))


def test_a_card_for_a_single_process_is_told_and_nothing_else_about_it() -> None:
    told = replace(a_record(), one_process=True)
    assert parse_record(encode_record(told)) == told
    for other in ("1", "false", '"resnet"'):
        with pytest.raises(RecordError, match="one_process"):
            parse_record(encode_record(told).replace('"one_process":true', f'"one_process":{other}'))


def test_only_a_user_s_own_record_names_a_token() -> None:
    token = "gs-abcdefghijklmnop2345"
    own = replace(a_record(), scope=Scope.COMMAND, token=token)
    assert parse_record(encode_record(own)).token == token
    with pytest.raises(RecordError, match="token"):
        encode_record(replace(own, scope=Scope.JOB))


@pytest.mark.parametrize(
    ("nvml", "model"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("", None),
        ("Ünicode", None),
        ("x" * 100, None),
    ],
)
def test_the_model_is_what_rates_are_kept_by(nvml: str, model: str | None) -> None:
    assert gpu_model(nvml) == model


def test_attribute_names_say_their_unit() -> None:
    units = {"%": "_pct", "MiB": "_mib", "MiB/s": "_mib_s", "1/s": "_s", "MHz": "_mhz", "W": "_w", "°C": "_c"}
    for attribute in ATTRIBUTES.values():
        if attribute.unit in units:
            assert attribute.name.endswith(units[attribute.unit])


def test_every_attribute_of_the_paper_but_the_user_s_own_is_measured(data_dir: Path) -> None:
    with (data_dir / "paper_workloads.csv").open(encoding="utf-8") as file:
        columns = file.readline().strip().split(",")
    covered = {name for attribute in ATTRIBUTES.values() for name in attribute.paper.split(", ")}
    user_sensitive = {"ID", "Model", "Dataset", "Epoch", "BS", "Run_Env"}
    never_counted = {"CS_syscalls"}
    assert {column for column in columns if column not in covered | user_sensitive | never_counted} == set()
