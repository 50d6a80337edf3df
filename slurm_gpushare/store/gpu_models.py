"""The two names of a GPU model: the site's (``v100``, in features and GRES types), and the cards' own (``V100``).

Telemetry, profiles and rates are kept by the card's own name, since that is what nodes measure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from sqlalchemy import Connection, select

from slurm_gpushare.protocol.record import gpu_model
from slurm_gpushare.store import schema
from slurm_gpushare.store.database import Database

MODEL_PREFIX = "gpu."
"""``gpu.V100`` counts the records of nodes that named this model."""
_LIKE_A_CARD = re.compile(r"[A-Z]+\d+[A-Z]*")


def own_name(site_name: str) -> str:
    """What the cards of a model most likely call themselves."""
    return gpu_model(site_name) or site_name.upper()


def own_names(site_names: Sequence[str], reported: Collection[str]) -> dict[str, str]:
    """The cards' own name by the site's. `reported` are the models that nodes have named in records.

    A site with one model may call it what no card is called (``volta``), as long as its nodes report a single one.
    """
    names = {name: own_name(name) for name in site_names}
    if len(names) == 1 and len(reported) == 1 and not any(map(_LIKE_A_CARD.fullmatch, names.values())):
        return dict.fromkeys(names, next(iter(reported)))
    return names


def reported_models(connection: Connection) -> set[str]:
    """The models that nodes have named in records."""
    c = schema.counter.c
    found = connection.scalars(select(c.name).where(c.name.startswith(MODEL_PREFIX, autoescape=True)))
    return {name.removeprefix(MODEL_PREFIX) for name in found}


def models_of(database: Database, site_names: Sequence[str]) -> dict[str, str]:
    """`own_names`, by what the nodes of this store have reported."""
    with database.read() as connection:
        return own_names(site_names, reported_models(connection))
