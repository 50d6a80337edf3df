"""A load of a set kind and duty on a card, through libcuda alone: what ``gpushare card-check`` tries cards with.

    python -m slurm_gpushare.node.load_generator KIND DUTY MIB

It works in steps of `STEP_S`, as a training job does: `DUTY` of a step is a kernel, which takes that long on an idle
card, and in the rest nothing is asked of the card. libcuda comes with the driver and compiles the kernels' PTX itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

KERNELS = Path(__file__).with_name("kernels.ptx")
KINDS = ("arithmetic", "streaming")
STEP_S = 0.04
_MIB = 1024 * 1024
_BLOCKING_SYNC = 4  # a waiting host thread sleeps; by default it would keep a core busy
_ABOUT = (75, 76, 16)  # compute capability, major and minor; multiprocessors
_THREADS, _BLOCKS_EACH = 256, 8
_LONG_ENOUGH_S = 0.004
"""A kernel that takes so long says how long a round takes, whatever its launch costs."""
_MOST_ROUNDS = 2**28


class CudaError(Exception):
    """What the driver refused, and its own name for why: ``cuCtxCreate_v2: CUDA_ERROR_INVALID_DEVICE``."""


class Driver:
    """libcuda's functions; every answer but success raises CudaError."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError("libcuda.so.1 cannot be loaded") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode('ascii', 'replace')} ({code})")

    def number(self, name: str, *arguments: Any) -> int:
        """The number that a function writes to its first argument."""
        found = ctypes.c_int()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value


class Context:
    """A context on the first card that this process may use, with `mib` of its memory."""

    def __init__(self, mib: int) -> None:
        self._driver = driver = Driver()
        driver.call("cuInit", 0)
        device = driver.number("cuDeviceGet", 0)

        major, minor, self._multiprocessors = (driver.number("cuDeviceGetAttribute", item, device) for item in _ABOUT)
        self.facts = {
            "cuda_version": driver.number("cuDriverGetVersion"), "compute_capability": f"{major}.{minor}",
            "multiprocessors": self._multiprocessors, "cards": driver.number("cuDeviceGetCount"),
        }  # fmt: skip
        context = ctypes.c_void_p()
        driver.call("cuCtxCreate_v2", ctypes.byref(context), _BLOCKING_SYNC, device)
        module = ctypes.c_void_p()
        text = KERNELS.read_bytes()
        driver.call("cuModuleLoadDataEx", ctypes.byref(module), ctypes.c_char_p(text), 0, None, None)
        self._functions = {kind: ctypes.c_void_p() for kind in KINDS}
        for kind, function in self._functions.items():
            driver.call("cuModuleGetFunction", ctypes.byref(function), module, kind.encode())
        self._data = self.allocate(mib)
        self._words = mib * _MIB // 4

    def allocate(self, mib: int) -> ctypes.c_uint64:
        """Memory of the card; CudaError with CUDA_ERROR_OUT_OF_MEMORY where there is not so much."""
        pointer = ctypes.c_uint64()
        self._driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib * _MIB))
        return pointer

    def run(self, kind: str, rounds: int) -> float:
        """Run a kernel to its end; how many seconds that took."""
        arguments = (self._data, ctypes.c_uint32(self._words), ctypes.c_uint32(rounds))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
        blocks = _BLOCKS_EACH * max(self._multiprocessors, 1)
        began = time.monotonic()
        self._driver.call(
            "cuLaunchKernel", self._functions[kind], blocks, 1, 1, _THREADS, 1, 1, 0, None, pointers, None
        )
        self._driver.call("cuCtxSynchronize")
        return time.monotonic() - began

    def rounds_for(self, kind: str, seconds: float) -> int:
        """How many rounds of a kernel take so long while nobody else is at work on the card."""
        rounds = 1
        while (took := min(self.run(kind, rounds) for _ in range(3))) < _LONG_ENOUGH_S and rounds < _MOST_ROUNDS:
            rounds *= 2
        return max(1, round(rounds * seconds / took))


def _serve(kind: str, duty: float, mib: int) -> None:
    """Say that it is ready; then for each line, a number of seconds, work so long and say how many steps a second."""
    context = Context(mib)
    rounds = context.rounds_for(kind, STEP_S * duty)
    _say({"ready": True})
    for line in sys.stdin:
        began, steps = time.monotonic(), 0
        while (now := time.monotonic()) < began + float(line):
            context.run(kind, rounds)
            steps += 1
            time.sleep(max(0.0, STEP_S * (1 - duty)) if duty < 1 else 0.0)
        _say({"steps_s": steps / max(now - began, 1e-6)})


def _say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Load:
    """The parent's side of a load, in a process of its own; a context manager, which ends it."""

    def __init__(self, environ: Mapping[str, str], kind: str = "arithmetic", duty: float = 1.0, mib: int = 256,
                 uid: int | None = None) -> None:  # fmt: skip
        argv = [sys.executable, "-m", "slurm_gpushare.node.load_generator", kind, str(duty), str(mib)]
        self._process = subprocess.Popen(
            argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            user=uid, group=uid, extra_groups=None if uid is None else [],
        )  # fmt: skip
        self._in = cast(IO[str], self._process.stdin)
        self._out = cast(IO[str], self._process.stdout)
        _answered(self._out.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, seconds: float) -> None:
        """Let it work for so long, alone or beside others."""
        try:
            print(seconds, file=self._in, flush=True)
        except OSError as error:
            raise CudaError("the load has ended") from error

    def steps_s(self) -> float:
        """How many steps a second it made; waits until it is through. CudaError if it could not go on."""
        return float(_answered(self._out.readline())["steps_s"])

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def together(loads: Sequence[Load], seconds: float) -> list[float]:
    """Steps a second of loads that work at the same time."""
    for load in loads:
        load.begin(seconds)
    return [load.steps_s() for load in loads]


def asked(environ: Mapping[str, str], question: str) -> dict[str, Any]:
    """What a process on the card answers: ``facts`` of card and driver (cuda_version is 12020 for 12.2), or ``memory``,
    how much it gets in steps of 64 MiB and what the driver says then. CudaError where it comes to neither.
    """
    argv = [sys.executable, "-m", "slurm_gpushare.node.load_generator", question]
    done = subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return _answered(done.stdout)


def _answered(line: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(line or '{"error": "the process on the card has died"}')
    if "error" in answer:
        raise CudaError(answer["error"])
    return answer


def _fill() -> dict[str, Any]:
    context, mib = Context(64), 64
    try:
        while True:
            context.allocate(64)
            mib += 64
    except CudaError as error:
        return {"mib": mib, "why": str(error)}


def main(arguments: Sequence[str]) -> None:
    """Run a load for the process that has started us; an error of the driver's is a line, too."""
    try:
        if arguments[0] in ("facts", "memory"):
            _say(Context(64).facts if arguments[0] == "facts" else _fill())
        else:
            _serve(arguments[0], float(arguments[1]), int(arguments[2]))
    except CudaError as error:
        _say({"error": str(error)})
    sys.stdout.flush()
    os._exit(0)  # a driver in trouble must not keep us in its destructors


if __name__ == "__main__":
    main(sys.argv[1:])
