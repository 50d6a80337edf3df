"""Jobs that carry a tag, as long as the store remembers anything: who they are, since when, and what their tags say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Row, or_, select, update

from slurm_gpushare.protocol.history import SLACK_S, StoredJob
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database, insert_many
from slurm_gpushare.store.statements import new_row, select_in

Periods = Mapping[int, Sequence[tuple[float, float]]]
"""From when to when a SLURM_JOB_ID meant the job that is asked about: Slurm gives ids anew."""
EVER: Sequence[tuple[float, float]] = ((0.0, float("inf")),)


def within(periods: Periods, job_id: int, at_s: float) -> bool:
    """Whether what happened under this id at that time happened to the job that is meant."""
    return any(start_s - SLACK_S <= at_s <= end_s + SLACK_S for start_s, end_s in periods.get(job_id, ()))


class Jobs:
    """``store.jobs``. One process follows the queue: the helper."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._open: dict[str, StoredJob] | None = None
        """Jobs in the queue, by key; None until they have been read."""

    def follow(self, queue: Iterable[StoredJob], now_s: float) -> dict[str, StoredJob]:
        """Bring the store up to what the queue is now; the jobs in it by key, each with its first submission.

        A job whose tag is gone keeps the one that is known. What has not changed costs nothing.
        """
        if self._open is None:
            with self._db.read() as connection:
                rows = connection.execute(select(schema.job).where(schema.job.c.end_s.is_(None)).order_by(_j.id))
                self._open = {row.job_key: StoredJob(**row._mapping) for row in rows}
        before, now, new, changed = self._open, dict[str, StoredJob](), list[StoredJob](), list[StoredJob]()
        for job in queue:
            known = before.get(job.job_key)
            if known is None or not known.goes_on_as(job):
                if job.tag:
                    new.append(job)
                continue
            job = replace(job, id=known.id, first_submit_s=known.first_submit_s)
            job = job if job.tag else replace(job, tag=known.tag, token=known.token)
            now[job.job_key] = job
            changed += [job] if job != known else []
        again = self._put_back([job for job in new if job.restarts])
        changed += again.values()
        now.update(again)
        changed += [replace(job, end_s=int(now_s)) for key, job in before.items()
                    if key not in now or now[key].id != job.id]  # fmt: skip
        added = [job for job in new if job.job_key not in now]
        if added or changed:
            with self._db.write() as connection:
                insert_many(connection, schema.job, [new_row(job) for job in added])
                for job in changed:
                    connection.execute(update(schema.job).where(_j.id == job.id).values(new_row(job)))
                query = select(schema.job).where(_j.end_s.is_(None)).order_by(_j.id)
                found = select_in(connection, query, _j.job_id, {job.job_id for job in added})
                keys = {job.job_key for job in added}
                now |= {row.job_key: StoredJob(**row._mapping) for row in found if row.job_key in keys}
        self._open = now
        return now

    def take_off(self, keys: Collection[str]) -> None:
        """The tags of these jobs in the queue are gone because we took them off."""
        taken = [self._open[key] for key in keys if self._open and key in self._open]
        with self._db.write() as connection:
            for job in taken:
                connection.execute(update(schema.job).where(_j.id == job.id).values(tag=""))
        self._open = (self._open or {}) | {job.job_key: replace(job, tag="") for job in taken}

    def add_ended(self, jobs: Sequence[StoredJob]) -> None:
        """Keep jobs that ended between two looks at the queue; those that are known stay as they are."""
        with self._db.write() as connection:
            query = select(_j.job_id, _j.submit_s, _j.uid)
            found = select_in(connection, query, _j.job_id, {job.job_id for job in jobs})
            known = {(row.job_id, row.submit_s, row.uid) for row in found}
            new = [job for job in jobs if (job.job_id, job.submit_s, job.uid) not in known]
            insert_many(connection, schema.job, [new_row(job) for job in new])

    def of_ids(self, job_ids: Collection[int]) -> dict[int, list[StoredJob]]:
        """All jobs that had these ids, oldest first."""
        with self._db.read() as connection:
            return _by_id(select_in(connection, select(schema.job).order_by(_j.id), _j.job_id, job_ids))

    def between(self, start_s: float, end_s: float) -> dict[int, list[StoredJob]]:
        """The jobs of a period, by id, oldest first."""
        query = select(schema.job).where(_j.first_submit_s < end_s, or_(_j.end_s.is_(None), _j.end_s > start_s))
        with self._db.read() as connection:
            return _by_id(connection.execute(query.order_by(_j.id)))

    def periods(self, owners: Mapping[int, int]) -> Periods:
        """When these ids meant jobs of those uids. Always, for one whose tag the helper has never met."""
        known = self.of_ids(owners)
        return {
            job_id: [
                (job.first_submit_s, float("inf") if job.end_s is None else job.end_s)
                for job in known[job_id] if job.uid == uid
            ] if job_id in known else EVER
            for job_id, uid in owners.items()
        }  # fmt: skip

    def _put_back(self, jobs: Sequence[StoredJob]) -> dict[str, StoredJob]:
        """Of jobs that come anew with restarts those that were in the queue before, by key."""
        known = self.of_ids({job.job_id for job in jobs}) if jobs else {}
        found = {}
        for job in jobs:
            earlier = [item for item in known.get(job.job_id, ()) if item.goes_on_as(job)]
            if earlier:
                found[job.job_key] = replace(job, id=earlier[-1].id, first_submit_s=earlier[-1].first_submit_s)
        return found


_j = schema.job.c


def _by_id(rows: Iterable[Row[Any]]) -> dict[int, list[StoredJob]]:
    found: dict[int, list[StoredJob]] = {}
    for row in rows:
        found.setdefault(row.job_id, []).append(StoredJob(**row._mapping))
    return found
