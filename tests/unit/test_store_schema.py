from __future__ import annotations

from pathlib import Path

from sqlalchemy import inspect

from slurm_gpushare.store import Store
from slurm_gpushare.store.schema import METADATA


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    with Store.create(f"sqlite:///{tmp_path}/store.sqlite") as store:
        found = inspect(store.database.engine)
        assert set(found.get_table_names()) - {"sqlite_sequence"} == set(METADATA.tables)
        for table in METADATA.tables.values():
            columns = [column["name"] for column in found.get_columns(table.name)]
            assert columns == [column.name for column in table.columns], table.name
            keys = found.get_pk_constraint(table.name)["constrained_columns"]
            assert keys == [column.name for column in table.primary_key], table.name
