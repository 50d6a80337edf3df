"""How many CPUs a workload needs, as its owner measured it with ``gpushare profile --cpus``.

A user's own record is enough here, although it founds no profile: it only decides what jobs of the same owner with
``cpus=auto`` ask for, and ``sbatch -c`` would do as much.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, select

from slurm_gpushare.store import schema
from slurm_gpushare.store.chunks import select_in
from slurm_gpushare.store.database import insert_many
from slurm_gpushare.store.workloads import touch
from slurm_gpushare.telemetry.record import Record, enough_cpus
from slurm_gpushare.telemetry.record_json import parse_record


def keep_curves(connection: Connection, tokens: Mapping[int, str]) -> None:
    """Keep the curves that users' runs brought, each under the token of its run. The latest measured counts."""
    d = schema.run_detail.c
    found: dict[str, Record] = {}
    for row in select_in(connection, select(d.id, d.body), d.id, tokens):
        record, token = parse_record(row.body), tokens[row.id]
        if record.cpu_curve and (token not in found or record.end_s > found[token].end_s):
            found[token] = record
    rows = {token: _row(token, record) for token, record in found.items() if _is_news(connection, token, record)}
    if rows:
        insert_many(connection, schema.cpu_curve, list(rows.values()), replace=True)
        touch(connection, rows)


def _is_news(connection: Connection, token: str, record: Record) -> bool:
    c = schema.cpu_curve.c
    known_s = connection.scalar(select(c.at_s).where(c.token == token))
    return known_s is None or record.end_s >= known_s


def _row(token: str, record: Record) -> dict[str, object]:
    return {"token": token, "cpus": enough_cpus(record.cpu_curve), "at_s": int(record.end_s)}
