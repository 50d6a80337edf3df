"""A stand-in for nvidia-cuda-mps-control that speaks its documented protocol, and fails as it fails.

    nvidia-cuda-mps-control -d [-multiuser-server]      starts a daemon for CUDA_MPS_PIPE_DIRECTORY
    echo COMMAND | nvidia-cuda-mps-control              asks it

A client (the stand-in of libcuda, an emulated job) leaves its pid and uid in ``clients/PID`` and waits for
``served/PID``, which names its server. One user's clients are served at a time, unless the daemon was started for
several. A client that ends without `terminate_client` while its file is still there has died with work on the card:
the server is then in FAULT, which every other client is told by ``fault``, until all have left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

NAME = "nvidia-cuda-mps-control"
SERVER = "nvidia-cuda-mps-server"
PID_FILE = f"{NAME}.pid"
_POLL_S = 0.02


def install(bin_dir: Path, module: str = "mps_control", name: str = NAME) -> Path:
    """The program, or another module of these stand-ins, in a directory for PATH."""
    bin_dir.mkdir(parents=True, exist_ok=True)
    program = bin_dir / name
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpushare_lab.emulator.{module} "$@"\n')
    program.chmod(0o755)
    return program


def pipe_dir() -> Path:
    """The real one has a default, where anybody may be first; tests always name theirs."""
    return Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


@dataclass
class Daemon:
    """The control daemon of one pipe directory."""

    root: Path
    multi_user: bool
    server: subprocess.Popen[bytes] | None = None
    server_uid: int = 0
    served: dict[int, int] = field(default_factory=dict)
    """uid by pid of the clients that are served."""
    faulty: bool = False
    threads: str = "100.0"
    limits: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        """Serve new clients, forget those that have left, notice those that have died."""
        for pid in [pid for pid in self.served if not (self.root / "clients" / str(pid)).exists()]:
            self._forget(pid)
        for pid in [pid for pid in self.served if not _alive(pid)]:
            self._forget(pid)
            self.faulty = bool(self.served)
        if self.faulty:
            (self.root / "fault").touch()
        if not self.served and self.faulty:
            self.faulty = False
            (self.root / "fault").unlink(missing_ok=True)
            self._end_server()
        for path in sorted((self.root / "clients").iterdir(), key=lambda path: path.stat().st_mtime):
            if path.name.isdecimal() and int(path.name) not in self.served and not self.faulty:
                self._serve(int(path.name), path)

    def _serve(self, pid: int, path: Path) -> None:
        if not _alive(pid):
            path.unlink(missing_ok=True)
            return
        uid = path.stat().st_uid
        if self.server is not None and not self.multi_user and uid != self.server_uid:
            if self.served:
                return  # as documented: it waits until the other user's clients are done
            self._end_server()
        if self.server is None:
            self.server_uid = 0 if self.multi_user else uid
            own = None if os.geteuid() else self.server_uid
            self.server = subprocess.Popen([SERVER, "infinity"], executable="/bin/sleep", user=own)
        self.served[pid] = uid
        (self.root / "served" / str(pid)).write_text(str(self.server.pid))

    def _forget(self, pid: int) -> None:
        self.served.pop(pid, None)
        for place in ("clients", "served"):
            (self.root / place / str(pid)).unlink(missing_ok=True)

    def _end_server(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None

    def answer(self, line: str) -> str:
        """What the control program prints for a command."""
        words = line.split() or [""]
        server = self.server.pid if self.server else None
        match words:
            case ["get_server_list"]:
                return f"{server}\n" if server else ""
            case ["get_server_status", pid]:
                return ("FAULT\n" if self.faulty else "ACTIVE\n") if pid == str(server) else f"Server {pid} not found\n"
            case ["get_client_list", pid] if pid == str(server):
                return "".join(f"{client}\n" for client in self.served)
            case ["terminate_client", pid, client] if pid == str(server) and client.isdecimal():
                if int(client) not in self.served:
                    return f"Client {client} not found\n"
                self._forget(int(client))
                return ""
            case ["set_default_device_pinned_mem_limit", device, limit]:
                self.limits[device] = limit
                (self.root / "limit").write_text(limit.removesuffix("M"))
                return ""
            case ["get_default_device_pinned_mem_limit", device]:
                return f"{self.limits.get(device, 'No limit')}\n"
            case ["set_default_active_thread_percentage", share]:
                self.threads = share
                return f"{float(share):.1f}\n"
            case ["quit", *_]:
                return ""
        return f"Invalid command: {line}\n" if words != [""] else ""

    def run(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.root / "control"))
            (self.root / "control").chmod(0o600)
            listener.listen(8)
            listener.settimeout(_POLL_S)
            going = True
            while going:
                self.look()
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(5)
                    line = connection.recv(4096).decode().strip()
                    self.look()
                    connection.sendall(self.answer(line).encode())
                    going = line.split()[:1] != ["quit"]
        self._end_server()
        for name in ("control", PID_FILE, "fault", "limit"):
            (self.root / name).unlink(missing_ok=True)


def _start(root: Path, multi_user: bool, foreground: bool) -> int:
    try:
        if _alive(int((root / PID_FILE).read_text())):
            print("An instance of this daemon is already running", file=sys.stderr)
            return 1
    except (OSError, ValueError):
        (root / PID_FILE).unlink(missing_ok=True)
    if multi_user and os.geteuid():
        print("-multiuser-server takes root", file=sys.stderr)
        return 1
    for name in ("clients", "served"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o1777 if name == "clients" else 0o755)
    (root / "control").unlink(missing_ok=True)
    if not foreground:
        if os.fork():
            while not (root / "control").exists():
                time.sleep(_POLL_S)
            return 0
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
    Path("/proc/self/comm").write_text(NAME)
    (root / "visible").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    (root / PID_FILE).write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Daemon(root, multi_user).run()
    return 0


def main(arguments: list[str]) -> int:
    root = pipe_dir()
    if "-d" in arguments or "-f" in arguments:
        return _start(root, "-multiuser-server" in arguments or "-M" in arguments, "-f" in arguments)
    for line in sys.stdin:
        if not line.strip():
            continue
        with socket.socket(socket.AF_UNIX) as asking:
            try:
                asking.connect(str(root / "control"))
                asking.sendall(line.encode())
                asking.shutdown(socket.SHUT_WR)
                while text := asking.recv(4096):
                    print(text.decode(), end="")
            except OSError:
                print("Cannot find MPS control daemon process", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
