"""Tokens of an experiment's workloads: the same in every run, different for different workloads."""

from __future__ import annotations

import base64
import hashlib


def made_up_token(name: str) -> str:
    """A token of 100 bits that follows from `name`; it looks like any other and shows nothing of it."""
    return "gs-" + base64.b32encode(hashlib.sha256(name.encode()).digest()).decode("ascii").lower()[:20]
