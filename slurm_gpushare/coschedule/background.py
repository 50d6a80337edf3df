"""Work beside the ticks must not slow them."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_NICENESS = 10


def lower_priority() -> None:
    """Of the calling thread alone. A unit or a container may forbid it, and the work is done all the same."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
