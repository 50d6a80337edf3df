"""The helpers' lease as a row, by the database's clock: where controllers are several, and the store is MariaDB.

Its table is none of the migrations': it is there before anybody may change the store, and no copy of the store has it.
"""

from __future__ import annotations

from sqlalchemy import text

from slurm_gpushare.store.database import Database

_MAKE = (
    "CREATE TABLE IF NOT EXISTS helper_lease (id INT PRIMARY KEY, number BIGINT NOT NULL, "
    "holder VARCHAR(200) NOT NULL, renewals BIGINT NOT NULL, renewed_s BIGINT NOT NULL) ENGINE=InnoDB"
)
_NOW = "UNIX_TIMESTAMP()"


class LeaseRow:
    """`slurm_gpushare.helper.lease.LeaseFile` in the store. Every method may raise StoreError."""

    def __init__(self, url: str) -> None:
        self._db = Database(url)
        self._made = False
        self._change("DO 0")

    def _change(self, statement: str, **values: object) -> bool:
        """Whether it changed a row. It waits for no other writer's turn."""
        with self._db.write(alone=False) as connection:
            if not self._made:
                connection.execute(text(_MAKE))
                connection.execute(text("INSERT IGNORE INTO helper_lease VALUES (1, 0, '-', 0, 0)"))
                self._made = True
            return connection.execute(text(statement), values).rowcount > 0

    def read(self) -> tuple[int, str, str, float] | None:
        query = f"SELECT number, holder, renewals, {_NOW} - renewed_s AS age_s FROM helper_lease WHERE id = 1"
        with self._db.read() as connection:
            row = connection.execute(text(query)).one()
        return (row.number, row.holder, str(row.renewals), float(row.age_s)) if row.number else None

    def take(self, before: int, holder: str) -> bool:
        return self._change(
            f"UPDATE helper_lease SET number = number + 1, holder = :holder, renewals = 0, renewed_s = {_NOW} "
            "WHERE id = 1 AND number = :before", before=before, holder=holder,
        )  # fmt: skip

    def renew(self, number: int, holder: str) -> bool:
        return self._change(
            f"UPDATE helper_lease SET holder = :holder, renewals = renewals + 1, renewed_s = {_NOW} "
            "WHERE id = 1 AND number = :number", number=number, holder=holder,
        )  # fmt: skip

    def is_at(self, number: int) -> bool:
        with self._db.read() as connection:
            return bool(connection.scalar(text("SELECT number FROM helper_lease WHERE id = 1")) == number)
