"""An emulated job's saved progress, so that a requeued job goes on where it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm_gpushare.protocol.errors import GpushareError
from slurm_gpushare.protocol.files import replace_text


@dataclass(frozen=True)
class Checkpoint:
    """Progress of one job; `work_s` and `epochs` tell whether it is the same job's."""

    work_s: float
    epochs: int
    done_s: float


def load(path: Path, work_s: float, epochs: int) -> float:
    """Seconds of work already done by the same job, 0 if there is nothing to resume."""
    try:
        saved = Checkpoint(**json.loads(path.read_text()))
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, TypeError) as error:
        raise GpushareError(f"cannot resume from {path}: {error}", "Remove it to start anew") from error
    if (saved.work_s, saved.epochs) != (work_s, epochs):
        raise GpushareError(f"{path} is the checkpoint of another job", "Remove it or name another file")
    return min(max(saved.done_s, 0.0), work_s)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write it whole, or leave the older one."""
    try:
        replace_text(path, json.dumps(asdict(checkpoint)))
    except OSError as error:
        raise GpushareError(f"cannot save a checkpoint in {path}: {error}") from error
