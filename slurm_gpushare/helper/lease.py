"""The lease: of all helpers of a Slurm cluster only the one that holds it changes anything.

It has a number that grows each time another helper takes it, and is renewed every few seconds. It lies where all
controllers see it: a row of the store where that is MariaDB, else a file in slurmctld's StateSaveLocation, whose name
ends in the number. Who finds that the number has grown, or could not renew for `BELIEVED_S`, changes nothing any more;
what its nodes were told to keep standing still goes on by itself. Another helper takes a lease that was not renewed for
`TAKEN_AFTER_S`, one that was given back, and one whose process on this very machine is gone.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from slurm_gpushare.helper import log
from slurm_gpushare.protocol.errors import GpushareError, SlurmError
from slurm_gpushare.protocol.files import hand_over
from slurm_gpushare.protocol.settings import Config
from slurm_gpushare.slurm.commands import Slurm
from slurm_gpushare.slurm.runner import ControllerDown

if TYPE_CHECKING:  # it brings the database library
    from slurm_gpushare.store.lease_row import LeaseRow

RENEW_EVERY_S = 5.0
BELIEVED_S = 20.0
TAKEN_AFTER_S = 30.0
FREE = "-"
"""The holder of a lease that was given back."""
_FILE = "gpushare-lease."


class NotInCharge(ControllerDown):
    """This helper must not change anything: it does not hold the lease, or cannot be sure of it."""


class Held(NamedTuple):
    """A lease as it was read."""

    number: int
    holder: str
    """Host, process id, and what tells the process from others with that id."""
    stamp: str
    """Differs after each renewal."""
    age_s: float
    """Since the last renewal, by the clock of who keeps the lease."""

    @property
    def host(self) -> str:
        """Where the holder is; empty if nobody holds it."""
        return "" if self.holder == FREE else self.holder.split()[0]


class LeaseFile:
    """A lease as a file; taking it is renaming it, which one of several succeeds in.

    As `slurm_gpushare.store.lease_row.LeaseRow`, whose methods may raise StoreError where these raise OSError.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._renewals = 0

    def _path(self, number: int) -> Path:
        return self._directory / f"{_FILE}{number}"

    def _numbers(self) -> list[int]:
        found = (name.removeprefix(_FILE) for name in os.listdir(self._directory) if name.startswith(_FILE))
        return sorted(int(number) for number in found if number.isdecimal())

    def read(self) -> tuple[int, str, str, float] | None:
        """The lease as it is, as in `Held`; None if there has been none."""
        for number in reversed(self._numbers()):
            with self._path(number).open() as file:
                holder, _, stamp = file.read(400).strip().rpartition(" ")
                age_s = time.time() - os.fstat(file.fileno()).st_mtime
            return number, holder or FREE, stamp, age_s
        return None

    def take(self, before: int, holder: str) -> bool:
        """Take it from who has it with the number `before`; False if another was first. The number is one more."""
        path = self._path(before + 1)
        try:
            if before:
                self._path(before).rename(path)
            else:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
                hand_over(path)
        except (FileNotFoundError, FileExistsError):
            return False
        if self._numbers()[-1] != before + 1:  # a first one was made while another was being renamed
            path.unlink(missing_ok=True)
            return False
        return self.renew(before + 1, holder)

    def renew(self, number: int, holder: str) -> bool:
        """Say that its holder lives; False if it has another number by now."""
        self._renewals += 1
        try:
            handle = os.open(self._path(number), os.O_WRONLY)
        except FileNotFoundError:
            return False
        with os.fdopen(handle, "w") as file:
            file.write(f"{holder} {self._renewals}\n")
            file.truncate()
        return self.is_at(number)

    def is_at(self, number: int) -> bool:
        """Whether nobody has taken it since it got that number."""
        try:  # opened: a client of NFS then asks the server
            os.close(os.open(self._path(number), os.O_RDONLY))
        except FileNotFoundError:
            return False
        return True


def this_process() -> str:
    """The holder's text for this process."""
    return f"{socket.gethostname()} {os.getpid()} {_identity(os.getpid())}"


def _identity(pid: int) -> str:
    """What tells the process `pid` of this machine from another one with its id; raises OSError if it is gone."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}.{started}"


def is_gone(holder: str) -> bool:
    """Whether the holder was a process of this machine, and has ended."""
    host, _, rest = holder.partition(" ")
    pid, _, identity = rest.partition(" ")
    ours = this_process().split()
    if host != ours[0] or identity.split(".")[:2] != ours[2].split(".")[:2] or not pid.isdecimal():
        return False
    try:
        return _identity(int(pid)) != identity
    except OSError:
        return True


class Lease:
    """This helper's part in it."""

    def __init__(self, place: LeaseFile | LeaseRow, acting: Callable[[], bool | None] = lambda: True) -> None:
        """`acting` says whether this machine's slurmctld is the acting one; None: nobody knows."""
        self._place, self._acting = place, acting
        self._holder = this_process()
        self.number = 0
        """Ours; 0 while it is not ours."""
        self._renewed_s = -BELIEVED_S
        self._seen: Held | None = None
        self._seen_s = 0.0
        """Whose it was, and since when it has not been renewed, by our own clock."""

    def look(self) -> Held | None:
        """Renew it, take it if it is to be had, or give it back if another controller acts now; whose it then is.

        None: ours. Raises OSError or GpushareError where it cannot be read or written.
        """
        begun_s = time.monotonic()
        if self.number:
            if self._place.renew(self.number, self._holder):
                self._renewed_s = begun_s
            else:
                self.number = 0
        acting = self._acting()
        if self.number and acting is not False:
            return None
        self.give_back()
        read = self._place.read()
        found = Held(*read) if read else Held(0, FREE, "", 0.0)
        if acting and self._may_take(found) and self._place.take(found.number, self._holder):
            self.number, self._renewed_s = found.number + 1, begun_s
            log.info("lease", number=self.number, before=found.host or None)
            return None
        return found

    def _may_take(self, found: Held) -> bool:
        before, self._seen = self._seen, found
        if before is None or (found.number, found.stamp) != (before.number, before.stamp):
            self._seen_s = time.monotonic()
        return not found.host or is_gone(found.holder) or time.monotonic() - self._seen_s > TAKEN_AFTER_S

    def check(self) -> None:
        """Before each change: NotInCharge unless the lease is surely ours."""
        if not self.number or time.monotonic() - self._renewed_s > BELIEVED_S:
            raise NotInCharge("the helpers' lease could not be renewed", "Nothing is changed until it is.")
        try:
            ours = self._place.is_at(self.number)
        except (OSError, GpushareError) as why:
            raise NotInCharge(f"the helpers' lease cannot be read: {why}") from why
        if not ours:
            raise NotInCharge("another helper has taken the lease")

    def renew_and_check(self) -> None:
        """`check` for one look by hand, beside which nobody renews it: a full spool may take longer than it lasts."""
        self.look()
        self.check()

    def give_back(self) -> None:
        """Let another one have it at once."""
        number, self.number = self.number, 0
        if number:
            self._place.renew(number, FREE)


# Where it lies, and which controller acts.


_PING = re.compile(r"Slurmctld\(\w+\) at (\S+) is (UP|DOWN)")


def lease_keeper(config: Config, slurm_conf: Mapping[str, str]) -> LeaseFile | LeaseRow:
    """Where the lease of this Slurm cluster lies."""
    if config.store_file is None:
        from slurm_gpushare.store.lease_row import LeaseRow

        return LeaseRow(config.store_url)
    directory = Path(slurm_conf.get("StateSaveLocation", config.state_dir))
    if len(controllers(slurm_conf)) < 2 and not os.access(directory, os.W_OK):
        log.warning("lease", error=f"{directory} is not ours to write: another helper with a StateDir of its own would "
                    "go unnoticed", hint="Run 'gpushare configure --write'.")  # fmt: skip
        directory = config.state_dir
    return LeaseFile(directory)


def controllers(slurm_conf: Mapping[str, str]) -> list[str]:
    """The hosts of SlurmctldHost, the primary first."""
    found = sorted(name for name in slurm_conf if name.startswith("SlurmctldHost["))
    return [slurm_conf[name].partition("(")[0] for name in found]


def acts_here(slurm: Slurm) -> bool | None:
    """Whether this machine's slurmctld is the acting one: the only one, or the first that is up. None: nobody knows.

    Slurm is asked each time: a backup controller may be new.
    """
    try:
        found = _PING.findall(slurm.ping())
    except SlurmError:
        return None
    up: list[str] = [host.partition(".")[0] for host, state in found if state == "UP"]
    if len(found) > 1 and up:
        return up[0] == socket.gethostname().partition(".")[0]
    return True if len(found) == 1 else None


def open_lease(config: Config, slurm: Slurm) -> Lease:
    """This helper's part in the lease of its Slurm cluster. Raises GpushareError while Slurm or the store is away."""
    return Lease(lease_keeper(config, slurm.config()), lambda: acts_here(slurm))


def stand_by(config: Config, slurm: Slurm, lease: Lease | None, *, patient: bool) -> Lease:
    """Wait until the lease is ours. Who is not `patient` looks once, and gets a GpushareError that says whose it is."""
    said = ""
    while True:
        try:
            lease = lease or open_lease(config, slurm)
            if (held := lease.look()) is None:
                return lease
            why = f"the helper on {held.host} is in charge" if held.host else "another controller acts"
        except (OSError, GpushareError) as error:
            why = str(error)
            if not patient:
                raise
        if not patient:
            raise GpushareError(why, "One helper a Slurm cluster is enough.")
        if why != said:
            log.info("standby", why=why)
        said = why
        time.sleep(RENEW_EVERY_S)


def in_charge(config: Config, slurm: Slurm) -> Held | None:
    """Who holds the lease, if it was renewed lately. Raises OSError or GpushareError if nobody can say."""
    read = lease_keeper(config, slurm.config()).read()
    held = Held(*read) if read else None
    return held if held is not None and held.host and held.age_s <= TAKEN_AFTER_S else None


class Lock:
    """An flock on ``StateDir/backfill.lock``: it ends with the process, however that ends."""

    def __init__(self, directory: Path, hint: str = "One is enough.") -> None:
        """`hint` says what to do while a helper holds it."""
        self._path = directory / "backfill.lock"
        self._hint = hint
        self._handle = -1

    def __enter__(self) -> Lock:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # SlurmUser's alone: whoever can open it can hold the lock.
            self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            hand_over(self._path)
        except OSError as why:
            raise GpushareError(
                f"{self._path}: {why.strerror}", "StateDir must belong to SlurmUser; the helper runs as SlurmUser."
            ) from why
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(self._handle)
            raise GpushareError(f"a helper runs already, with process id {holder}", self._hint) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())
        return self

    def is_held(self) -> bool:
        """Whether the file that we have locked is still the one that others would lock."""
        try:
            ours, there = os.fstat(self._handle), self._path.stat()
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)
