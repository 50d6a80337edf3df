"""The bytes of a card file, which the C library mirrors in its structs.

A card is one file of fixed size that is made once, never truncated, and mapped by everyone: a header that says what
the card is, then slots, one for each stay of a job. A job writes only in its own slot. What a reader may rely on is
published by one aligned 8-byte store after the bytes that it makes visible: `join_us` for the slot, `head` for the
newest sample of its ring, `leave_us` for its end. A job that is killed or stopped at any instruction therefore never
shows a half-written value, and no reader ever waits for it. Times are microseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import struct

MAGIC = b"GSCARD01"
SLOTS = 32
RING = 56

HEADER = struct.Struct("=8sIIIIQQII96s48s32s")
HEADER_BYTES = 4096
COMPUTE_MODE_AT = 20

SLOT_BYTES = 2048
PID_AT, START_TICKS_AT, JOIN_AT, LEAVE_AT, MEMORY_AT, HEAD_AT = 0, 8, 16, 24, 32, 40
DEMAND = struct.Struct("=6d")  # gpu_util_pct, mem_access_pct, pcie_mib_s, cpu_pct, two spare
DEMAND_AT = 48
PROFILE_AT, PROFILE_BYTES = 96, 64
RING_AT = 256
SAMPLE = struct.Struct("=Qffffd")  # at_us, sm %, memory %, tx KB/s, rx KB/s, rate

CARD_BYTES = HEADER_BYTES + SLOTS * SLOT_BYTES

assert RING_AT + RING * SAMPLE.size == SLOT_BYTES


def slot_at(slot: int) -> int:
    """Where a slot begins in the file."""
    return HEADER_BYTES + slot * SLOT_BYTES
