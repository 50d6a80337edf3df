"""One ``pyslurm.Job`` of pyslurm 25.11 as the `Job` that squeue's answer would give.

What pyslurm leaves out cannot be guessed: ``--gpus`` and ``--gpus-per-socket`` come without type and cannot be told
apart, and ``--mem-per-gpu`` looks like ``--mem``. `unsure` says where that may matter, so that squeue is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_gpushare.slurm.array_tasks import expand_tasks
from slurm_gpushare.slurm.hostlist import expand
from slurm_gpushare.slurm.queue import RUNNING, Job
from slurm_gpushare.slurm.tag import parse_tag

_SHARED = frozenset({"OK", "YES"})


def listed(record: Any) -> bool:
    """Whether squeue would list it: pyslurm also has jobs that ended lately."""
    return record.state == "PENDING" or record.state in RUNNING


def unsure(record: Any) -> bool:
    """Whether the request must be asked of squeue: a GPU that nothing explains, or that shards might not carry."""
    asked = _requested_gres(record)
    if not asked:
        return False
    explained = record.gres_per_node or (record.tres_per_task and record.tres_per_task.gres)
    return not explained or record.cpus_per_task is None or parse_tag(record.admin_comment or "") is not None


def translate(record: Any) -> Iterator[Job]:
    """The `Job`s that a record stands for: itself, or the waiting tasks of an array."""
    admin_comment = record.admin_comment or ""
    for key, task_id in _keys(record):
        yield Job(
            key=key,
            raw_id=record.id,
            array_id=record.array_id if task_id is not None else None,
            task_id=task_id,
            het=bool(record.heterogeneous_id),
            uid=record.user_id,
            account=record.account or "",
            partitions=tuple((record.partition or "").split(",")),
            reservation=record.reservation or "",
            state=record.state,
            reason="" if record.state_reason in (None, "None") else record.state_reason,
            priority=record.priority or 0,
            nice=record.nice or 0,
            submit_s=record.submit_time or 0,
            eligible_s=record.eligible_time or None,
            start_s=record.start_time or None,
            end_s=_end_s(record),
            limit_s=record.time_limit * 60 if isinstance(record.time_limit, int) else None,
            num_nodes=record.num_nodes or 1,
            nodes=expand(record.allocated_nodes or ""),
            wanted_nodes=record.required_nodes or "",
            excluded_nodes=expand(record.excluded_nodes or ""),
            features="&".join(record.constraints or ()),
            exclusive=record.resource_sharing not in _SHARED,
            dependency=_dependency(record.dependencies),
            requeue=bool(record.is_requeueable),
            restarts=record.requeue_count or 0,
            cpus=record.cpus or 1,
            mem_mib=_memory_mib(record),
            per_job="",
            per_node=",".join(f"{name}:{count}" for name, count in (record.gres_per_node or {}).items()),
            per_socket="",
            per_task=_per_task(record.tres_per_task),
            per_gpu_extras=record.cpus_per_task is None,
            admin_comment=admin_comment,
            tag=parse_tag(admin_comment),
        )


def _keys(record: Any) -> Iterator[tuple[str, int | None]]:
    if record.array_tasks_waiting:
        for task in expand_tasks(record.array_tasks_waiting):
            yield f"{record.array_id}_{task}", task
    elif record.array_id is not None:  # task 0 comes as None
        task = record.array_task_id or 0
        yield f"{record.array_id}_{task}", task
    elif record.heterogeneous_id:
        yield f"{record.heterogeneous_id}+{record.heterogeneous_offset or 0}", None
    else:
        yield str(record.id), None


def _end_s(record: Any) -> int | None:
    """Of a job without a limit pyslurm says a year from now, until it has ended."""
    endless = not isinstance(record.time_limit, int) and listed(record)
    return None if endless else record.end_time or None


def _memory_mib(record: Any) -> int:
    tres = record.allocated_tres or record.requested_tres
    return int(tres.mem.count) if tres is not None and tres.mem is not None else 0


def _requested_gres(record: Any) -> bool:
    return record.requested_tres is not None and bool(record.requested_tres.gres)


def _per_task(tres: Any) -> str:
    if tres is None:
        return ""
    cpu = [f"cpu={tres.cpu.count}"] if tres.cpu is not None else []
    return ",".join([*cpu, *(f"{item.type_and_name}={item.count}" for item in tres.gres.values())])


def _dependency(found: Any) -> str:
    """What it waits for. A mapping in which nothing is named is a singleton that waits."""
    if found is None:
        return ""
    between = "?" if found.get("satisfy") == "any" else ","
    named = [f"{kind}:{one}" for kind, ids in found.items() if isinstance(ids, list) for one in ids]
    return between.join(named) or "singleton(unfulfilled)"
