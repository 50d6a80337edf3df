"""Users' names and numbers, as this machine knows them."""

from __future__ import annotations

import pwd
from functools import cache


@cache
def user_name(uid: int) -> str:
    """The user's name, or the number where this machine does not know it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(user: str) -> int | None:
    """The uid of a name, or the number itself; None where there is no such user."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
