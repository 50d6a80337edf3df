"""Which daemons make a testbed, in the order in which they start, and how each shows that it is ready."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from gpushare_lab.testbed import database, namespace
from gpushare_lab.testbed.daemons import Background
from gpushare_lab.testbed.environment import daemon_env
from gpushare_lab.testbed.layout import Layout, State

SLURMD = "slurmd-"
Ask = Callable[[Sequence[str]], str]  # the output of a Slurm command, empty if it failed


def services(layout: Layout, state: State, enter: Sequence[str], ask: Ask) -> Iterator[Background]:
    """`enter` leads into the root file system of another release; munge and MariaDB are always this machine's."""
    env = {**os.environ, **daemon_env(layout)}

    def daemon(name: str, argv: Sequence[str], ready: Callable[[], bool]) -> Background:
        # What Slurm's daemons log before they have read their LogFile's name is only on stderr.
        return Background(name, argv, env, layout.run, layout.log / f"{name}.err", ready)

    if enter:
        yield daemon(namespace.HOLDER, namespace.holder_argv(layout), partial(namespace.is_ready, layout))
    yield daemon("munged", _munge_argv(layout), partial(_unix_answers, layout.munge_socket))
    if state.accounting:
        yield daemon("mariadbd", database.server_argv(layout), partial(database.answers, layout))
        yield daemon("slurmdbd", [*enter, "slurmdbd", "-D"], partial(_tcp_answers, state.ports.slurmdbd))
    # -i: what a killed slurmctld left of its state is better than no start.
    yield daemon("slurmctld", [*enter, "slurmctld", "-D", "-i"], partial(_controller_is_up, state, ask))
    for node in state.shape.node_names:
        yield daemon(f"{SLURMD}{node}", [*enter, "slurmd", "-D", "-N", node], partial(_node_is_up, node, ask))


def _munge_argv(layout: Layout) -> list[str]:
    return [
        "munged",
        "--foreground",
        "--force",  # it would refuse a socket that a killed predecessor left
        f"--key-file={layout.etc}/munge.key",
        f"--socket={layout.munge_socket}",
        f"--pid-file={layout.run}/munged.own.pid",
        f"--log-file={layout.log}/munged.log",
        f"--seed-file={layout.run}/munged.seed",
        "--num-threads=4",
    ]


def _controller_is_up(state: State, ask: Ask) -> bool:
    return _tcp_answers(state.ports.slurmctld) and "is UP" in ask(["scontrol", "ping"])


def _node_is_up(node: str, ask: Ask) -> bool:
    states = ask(["sinfo", "-h", "-n", node, "-o", "%T"]).split()
    return bool(states) and all(state in {"idle", "mixed", "allocated", "completing"} for state in states)


def _tcp_answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _unix_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
