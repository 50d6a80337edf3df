"""Checks of JSON that came from elsewhere: exact fields, finite numbers in range, text of a known form.

A refusal names the field and never quotes the value, so that logs cannot be made to carry a user's text.
"""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from typing import Any, TypeVar

from slurm_gpushare.errors import GpushareError
from slurm_gpushare.telemetry.attributes import ANY

Choice = TypeVar("Choice", bound=StrEnum)


class RecordError(GpushareError):
    """A record does not fit the schema."""


def bad(where: str, why: str) -> RecordError:
    """The error to raise for a field."""
    return RecordError(f"record: {where} {why}")


def number(value: Any, where: str, limit: float = ANY) -> float:
    """A finite number from 0 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(where, "is not a number")
    if not 0 <= value <= limit or not math.isfinite(value):
        raise bad(where, f"is not from 0 to {limit:g}")
    return float(value)


def whole(value: Any, where: str, limit: int) -> int:
    """A whole number from 0 to `limit`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise bad(where, f"is not a whole number from 0 to {limit}")
    return value


def text(value: Any, where: str, pattern: re.Pattern[str]) -> str:
    """Text that `pattern` describes from its first character to its last."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise bad(where, "does not have the required form")
    return value


def choice(value: Any, where: str, kind: type[Choice]) -> Choice:
    """One of an enumeration's values."""
    try:
        return kind(value)
    except ValueError:
        raise bad(where, "is none of the known values") from None


def record_object(value: Any, where: str, required: set[str], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """An object with all of the `required` fields and no unknown one."""
    if not isinstance(value, dict) or not required <= value.keys() <= required | optional:
        raise bad(where, "does not have exactly the known fields")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise RecordError("record: a field is given twice")
    return body


def _no_constant(_: str) -> float:
    raise RecordError("record: has a number that is not finite")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def load_json(line: str | bytes, max_bytes: int) -> Any:
    """JSON in ASCII of bounded size, without repeated fields, NaN or infinities."""
    if len(line) > max_bytes:
        raise RecordError(f"record: longer than {max_bytes} bytes")
    try:
        return _DECODER.decode(line if isinstance(line, str) else line.decode("ascii"))
    except (ValueError, RecursionError):
        raise RecordError("record: not JSON") from None
