"""Who wrote a record: munge credentials, opened by the local munged.

A credential proves the uid that made it, whatever file system it crossed (root_squash changes a file's owner,
not its credential). libmunge, which Slurm itself uses, is called directly, since a process for each record
would be many times slower.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_gpushare.protocol.errors import GpushareError

_OPT_SOCKET = 8
_SUCCESS = 0
_SOCKET, _TIMEOUT = 6, 7
# Too old, from a clock ahead of ours, or seen before: a record in a spool may be all three, and its author is
# proven all the same. That it counts once is ensured by its own id.
_STILL_PROVEN = {_SUCCESS, 15, 16, 17}


class CredentialError(GpushareError):
    """The text is no credential of this Slurm cluster."""


class MungeDown(GpushareError):
    """munged does not answer: nothing can be said about any credential now."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The content of a credential and who made it."""

    uid: int
    payload: bytes


OpenCredential = Callable[[bytes], Sealed]


def opener(socket: Path | None = None) -> OpenCredential:
    """What opens credentials here; `socket` is munged's, by default munge's own choice."""
    try:
        return _Library(socket).open
    except OSError as why:
        raise MungeDown(f"libmunge.so.2: cannot be loaded: {why}", "Install munge's library (libmunge2).") from why


class _Library:
    def __init__(self, socket: Path | None) -> None:
        self._munge = ctypes.CDLL("libmunge.so.2")
        self._free = ctypes.CDLL(None).free
        self._free.argtypes = [ctypes.c_void_p]
        self._munge.munge_ctx_create.restype = ctypes.c_void_p
        self._munge.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
        self._munge.munge_ctx_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
        self._munge.munge_decode.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_int),
            ctypes.POINTER(ctypes.c_uint32),
            ctypes.POINTER(ctypes.c_uint32),
        ]
        self._socket = None if socket is None else str(socket).encode()

    def open(self, credential: bytes) -> Sealed:
        buffer, length = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        context = self._munge.munge_ctx_create()
        try:
            if self._socket is not None:
                self._munge.munge_ctx_set(context, _OPT_SOCKET, self._socket)
            status = self._munge.munge_decode(
                credential.strip(), context, *(ctypes.byref(item) for item in (buffer, length, uid, gid))
            )
        finally:
            self._munge.munge_ctx_destroy(context)
        try:
            _check(status)
            payload = ctypes.string_at(buffer.value, length.value) if buffer.value else b""
        finally:
            self._free(buffer)
        return Sealed(uid.value, payload)


def _check(status: int) -> None:
    if status in {_SOCKET, _TIMEOUT}:
        raise MungeDown("munge: munged does not answer", "Start munged, or set MungeSocket to its socket.")
    if status not in _STILL_PROVEN:
        raise CredentialError("not a munge credential of this Slurm cluster")
