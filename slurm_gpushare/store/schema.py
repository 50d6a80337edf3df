"""The store's tables, as SQLAlchemy sees them. ``sql/NNNN_*.sql`` makes them; a test compares the two."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, SmallInteger, String, Table, Text
from sqlalchemy.sql.type_api import TypeEngine

METADATA = MetaData()


def _table(table: str, key: str, /, **columns: type[TypeEngine[Any]] | TypeEngine[Any]) -> Table:
    keys = key.split()
    return Table(table, METADATA, *(Column(name, kind, primary_key=name in keys) for name, kind in columns.items()))


_TOKEN = String(40)
_NODE = String(64)
_MODEL = String(80)

workload = _table(
    "workload", "token",
    token=_TOKEN, owner_uid=BigInteger, created_s=BigInteger, mem_floor_mib=BigInteger, change_seq=BigInteger,
)  # fmt: skip
profile = _table(
    "profile", "token gpu_model",
    token=_TOKEN, gpu_model=_MODEL, generation=Integer, runs=Integer, mem_used_mib=BigInteger, mem_total_mib=BigInteger,
    duration_s=Double, features=Text, scatter=Text, cluster=Integer, needs_cluster=SmallInteger,
    updated_s=BigInteger,
)  # fmt: skip
run = _table(
    "run", "id",
    id=Integer, state=String(12), by_node=SmallInteger, author_uid=BigInteger, run_id=String(32), seq=BigInteger,
    token=_TOKEN, job_id=BigInteger, node=_NODE, gpu_index=Integer, gpu_model=_MODEL, start_s=Double, end_s=Double,
    alone_s=Double, shared_s=Double, generation=Integer, settled_seq=BigInteger,
)  # fmt: skip
run_detail = _table("run_detail", "id", id=Integer, features=Text, body=Text)
interim = _table(
    "interim", "job_id node gpu_index",
    job_id=BigInteger, node=_NODE, gpu_index=Integer, author_uid=BigInteger, run_id=String(32), seq=BigInteger,
    at_s=Double, body=Text,
)  # fmt: skip
ingested = _table(
    "ingested", "author_uid run_id", author_uid=BigInteger, run_id=String(32), seq=BigInteger, end_s=Double
)
inbox = _table("inbox", "id", id=Integer, received_s=BigInteger, credential=Text)
model = _table("model", "version", version=Integer, gpu_model=_MODEL, created_s=BigInteger, body=Text)
knowledge = _table("knowledge", "name", name=String(190), updated_s=BigInteger, body=Text)
observation = _table(
    "observation", "id",
    id=Integer, source=String(120), gpu_model=_MODEL, victim=_TOKEN, neighbour=_TOKEN, rate=Double, weight=Double,
    at_s=BigInteger,
)  # fmt: skip
decision = _table(
    "decision", "id",
    id=Integer, job_id=BigInteger, at_s=BigInteger, kind=String(16), node=_NODE, gpu_index=Integer,
    partner_job=BigInteger, rate=Double, reasons=Text,
)  # fmt: skip
sharing = _table(
    "sharing", "id",
    id=Integer, resident_job=BigInteger, guest_job=BigInteger, resident_token=_TOKEN, guest_token=_TOKEN, node=_NODE,
    gpu_index=Integer, gpu_model=_MODEL, start_s=BigInteger, end_s=BigInteger, resident_rate=Double, guest_rate=Double,
    resident_rate_seen=Double, guest_rate_seen=Double, gpus=Integer, paused_s=BigInteger,
)  # fmt: skip
ban = _table("ban", "token_a token_b", token_a=_TOKEN, token_b=_TOKEN, at_s=BigInteger)
remeasure = _table("remeasure", "token", token=_TOKEN, since_s=BigInteger)
cpu_curve = _table("cpu_curve", "token", token=_TOKEN, cpus=Integer, at_s=BigInteger)
strike = _table(
    "strike", "id",
    id=Integer, at_s=BigInteger, uid=BigInteger, token=_TOKEN, job_id=BigInteger, partner_job=BigInteger,
    feature=String(40), seen=Double, profiled=Double,
)  # fmt: skip
broken_promise = _table(
    "broken_promise", "id",
    id=Integer, at_s=BigInteger, job_id=BigInteger, uid=BigInteger, by_job=BigInteger, by_uid=BigInteger, node=_NODE,
    gpu_index=Integer, promised_pct=Double, slowed_pct=Double,
)  # fmt: skip
heartbeat = _table("heartbeat", "name", name=String(32), at_s=BigInteger)
counter = _table("counter", "name", name=String(32), value=BigInteger)
schema_version = _table("schema_version", "version", version=Integer, name=String(80), applied_s=BigInteger)
