"""``python -m slurm_gpushare.store.deliver``: put the sealed record on stdin into the store's inbox.

Samplers run it where nodes share no file system with the controller (RecordsTo=store). It is a process of its own so
that the database's drivers are not in every sampler's memory.
"""

from __future__ import annotations

import sys

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.settings_in_force import settings_in_force
from slurm_gpushare.store.database import Database
from slurm_gpushare.store.spool import Inbox


def main() -> int:
    """Exit code 0 once the record is in the database."""
    try:
        database = Database(settings_in_force().store_url, must_exist=True)
        try:
            Inbox(database).deliver(sys.stdin.buffer.read())
        finally:
            database.close()
    except GpushareError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
