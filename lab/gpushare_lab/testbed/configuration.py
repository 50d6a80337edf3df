"""The configuration files of a testbed, as text: pure functions of its layout and state."""

from __future__ import annotations

from gpushare_lab.testbed.layout import Layout, State
from slurm_gpushare.protocol.settings import KEYS

CLUSTER = "testbed"
PARTITION = "gpu"
UNMANAGED_PARTITION = "other"  # same nodes, not listed in gpushare.conf
# Users that every Debian has, so that none must be made, and their accounts.
TEST_USERS = {"games": "lab_a", "man": "lab_a", "nobody": "lab_b"}
CPUS_PER_NODE = 64
MEMORY_PER_NODE_MIB = 256_000


# What holds for every testbed, on whatever ports and with whatever hardware.
_ALWAYS = """\
SlurmdUser=root
AuthType=auth/munge
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=60
SlurmdTimeout=300
KillWait=2
# A test can still ask scontrol about a job that ended.
MinJobAge=3600
TreeWidth=64
SchedulerType=sched/backfill
# sched_min_interval is in microseconds: with the default of 2 s a placed job would start late on 22.05.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=10000,\
bf_interval=1,bf_yield_interval=1000000,bf_resolution=1,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
PriorityType=priority/multifactor
PriorityWeightAge=1000
PriorityMaxAge=1-0
PriorityWeightQOS=1000"""


def slurm_conf(layout: Layout, state: State, hostname: str, has_cli_filter: bool) -> str:
    """slurm.conf for daemons that all run on this machine, without cgroups: slurmd as root, the others as SlurmUser."""
    return _text(
        [
            f"ClusterName={CLUSTER}",
            f"SlurmctldHost={hostname}(127.0.0.1)",
            f"SlurmUser={state.slurm_user}",
            f"SlurmctldPort={state.ports.slurmctld}",
            f"AuthInfo=socket={layout.munge_socket}",
            f"StateSaveLocation={layout.spool}/slurmctld",
            f"SlurmdSpoolDir={layout.spool}/%n",
            f"SlurmctldPidFile={layout.slurm_run}/slurmctld.own.pid",
            f"SlurmdPidFile={layout.run}/%n.own.pid",
            f"SlurmctldLogFile={layout.log}/slurmctld.log",
            f"SlurmdLogFile={layout.log}/%n.log",
            _ALWAYS,
            *(["GresTypes=gpu"] if state.plain else _our_lines(layout)),
            *(["CliFilterPlugins=lua"] if has_cli_filter else []),
            *(_accounting_lines(layout, state) if state.accounting else []),
            *_node_lines(state, hostname),
        ]
    )


def _accounting_lines(layout: Layout, state: State) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=localhost",
        f"AccountingStoragePort={state.ports.slurmdbd}",
        f"AccountingStoragePass={layout.munge_socket}",  # not a password: how slurmctld finds munge for slurmdbd
        f"AccountingStorageTRES=gres/gpu{'' if state.plain else ',gres/shard'}",
        "AccountingStoreFlags=job_comment",
    ]


def _node_lines(state: State, hostname: str) -> list[str]:
    """The nodes, and two partitions of all of them."""
    names = state.shape.node_names
    nodes = [
        f"NodeName={name} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
        f"RealMemory={MEMORY_PER_NODE_MIB} {_node_gres(state, name)} State=UNKNOWN"
        for name, port in zip(names, state.ports.slurmd, strict=True)
    ]
    common = f"Nodes={','.join(names)} MaxTime=INFINITE DefaultTime=01:00:00 DefMemPerCPU=1000 State=UP"
    managed = f"PartitionName={PARTITION} Default=YES {common}"
    return [*nodes, managed, f"PartitionName={UNMANAGED_PARTITION} Default=NO {common}"]


def _node_gres(state: State, node: str) -> str:
    """A node's GPUs: of one type, or of one an index with shards."""
    shape = state.shape
    if state.plain:
        return f"Gres=gpu:{shape.model_of(node)}:{shape.gpus}"
    types = ",".join(f"gpu:{gpu_type}:1" for gpu_type in shape.gpu_types(node))
    return f"Feature={shape.model_of(node)} Gres={types},shard:{shape.gpus * shape.shards}"


def _our_lines(layout: Layout) -> list[str]:
    """What slurm.conf has because of us."""
    return [
        "GresTypes=gpu,shard",
        "PrologFlags=Alloc",
        f"Prolog={layout.etc}/prolog.sh",
        f"Epilog={layout.etc}/epilog.sh",
        f"TaskProlog={layout.etc}/task_prolog.sh",
        f"EpilogSlurmctld={layout.etc}/epilog_slurmctld.sh",
        "JobSubmitPlugins=lua",
    ]


def gres_conf(layout: Layout, state: State) -> str:
    """One Type for each GPU index; shards untyped, since their type comes from the GPU."""
    lines = ["AutoDetect=off"]
    for node in state.shape.node_names:
        if state.plain:
            files = f"{layout.dev}/{node}/nvidia[0-{state.shape.gpus - 1}]"
            lines.append(f"NodeName={node} Name=gpu Type={state.shape.model_of(node)} File={files}")
            continue
        lines += [
            f"NodeName={node} Name=gpu Type={gpu_type} File={layout.dev}/{node}/nvidia{index}"
            for index, gpu_type in enumerate(state.shape.gpu_types(node))
        ]
        lines.append(f"NodeName={node} Name=shard Count={state.shape.gpus * state.shape.shards}")
    return _text(lines)


def cgroup_conf(release: str) -> str:
    """No cgroups: the value that says so exists from 24.05; 22.05 needs nothing said."""
    return "CgroupPlugin=disabled\n" if version(release) >= (24, 5) else "CgroupAutomount=no\n"


def slurmdbd_conf(layout: Layout, state: State) -> str:
    return _text(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            "DbdHost=localhost",
            f"DbdPort={state.ports.slurmdbd}",
            f"SlurmUser={state.slurm_user}",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",  # over the private socket, which MYSQL_UNIX_PORT names
            f"StorageUser={state.slurm_user}",
            "StorageLoc=slurm_acct_db",
            f"LogFile={layout.log}/slurmdbd.log",
            f"PidFile={layout.slurm_run}/slurmdbd.own.pid",
            "DebugLevel=info",
        ]
    )


def accounts() -> str:
    """What ``sacctmgr load`` reads: one file, since each sacctmgr command takes half a second."""
    names = sorted(set(TEST_USERS.values()))
    lines = [f"Cluster - '{CLUSTER}'", "Parent - 'root'"]
    lines += [f"Account - '{name}':Description='{name}':Organization='{name}'" for name in names]
    for name in names:
        lines.append(f"Parent - '{name}'")
        lines += [f"User - '{user}':DefaultAccount='{name}'" for user, of in TEST_USERS.items() if of == name]
    return _text(lines)


def gpushare_conf(layout: Layout, state: State) -> str:
    """Our own settings, quick enough for tests; every key is known to the parser."""
    given = {
        "Partitions": PARTITION,
        "ShardsPerGpu": str(max(2, state.shape.shards)),
        "GpuModel": ",".join(state.shape.models),
        "GpusPerNode": str(state.shape.gpus),
        "SlurmVersion": state.release,
        "StoreUrl": f"sqlite:///{layout.gpushare}/store.sqlite",
        "HookFile": f"{layout.gpushare}/hook.sqlite",
        "SpoolDir": f"{layout.gpushare}/spool",
        "SlurmUser": state.slurm_user,
        "MungeSocket": str(layout.munge_socket),
        "StateDir": f"{layout.gpushare}/state",
        "PublicDir": f"{layout.gpushare}/public",
        "SampleSeconds": "0.2",
        "InterimSeconds": "2",
        "ProbeSeconds": "600",
        "LeaseSeconds": "10",
        "TickSeconds": "1",
    }
    unknown = given.keys() - {key.name for key in KEYS}
    assert not unknown, unknown
    return _text([f"{name}={value}" for name, value in given.items()])


def version(release: str) -> tuple[int, int]:
    """``22.05.8`` -> (22, 5)."""
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def with_keys(text: str, changes: dict[str, str]) -> str:
    """A configuration file's text with top-level keys set; an empty value removes the key."""
    lowered = {name.lower() for name in changes}
    kept = [line for line in text.splitlines() if line.partition("=")[0].strip().lower() not in lowered]
    return _text([f"{name}={value}" for name, value in changes.items() if value] + kept)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
