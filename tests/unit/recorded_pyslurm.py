"""Objects that pyslurm 25.11.2 gave beside a real Slurm 25.11.7, and what squeue said of the same jobs then."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "pyslurm" / "25.11.json"


class Recorded(SimpleNamespace):
    """An object of pyslurm's; an attribute that raised when it was recorded raises again."""

    def __getattr__(self, name: str) -> Any:
        raise self.__dict__.get("_raises", {}).get(name) or AttributeError(name)


def _value(form: Any) -> Any:
    if not isinstance(form, dict):
        return form
    if "hex" in form:
        return bytes.fromhex(form["hex"])
    if "items" in form:
        return {key: _value(item) for key, item in form["items"]}
    if "attributes" in form:
        return _object(form["attributes"])
    if "repr" in form:
        return form["repr"]
    plain = form["value"]
    return [_value(item) for item in plain] if isinstance(plain, list) else plain


def _object(attributes: dict[str, Any]) -> Recorded:
    raising = {name: form for name, form in attributes.items() if isinstance(form, dict) and "raises" in form}
    errors = {name: getattr(builtins, form["raises"])(*map(_value, form["args"])) for name, form in raising.items()}
    return Recorded(_raises=errors, **{name: _value(form) for name, form in attributes.items() if name not in raising})


@dataclass(frozen=True)
class RecordedJob:
    """One ``pyslurm.Job`` and squeue's rows for it, as fields of `slurm.queue.Job`."""

    label: str
    listed: bool
    record: Recorded
    rows: list[dict[str, Any]]


def recorded_jobs() -> Iterator[RecordedJob]:
    part = json.loads(FILE.read_text())["jobs"]
    for record in part["records"]:
        one = record["expected"]
        tasks = record["expected_tasks"] or []
        rows = [{**one, "task_id": task, "key": f"{one['array_id']}_{task}"} for task in tasks] or [one]
        found = _object({**part["in_every_record"], **record["pyslurm"]})
        yield RecordedJob(record["label"], record["listed"], found, rows)
