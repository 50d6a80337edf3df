"""A child process that its caller cannot tell from having been run directly.

Same terminal, process group, descriptors and signal dispositions; signals that reach us reach it; our exit is its exit.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Mapping, Sequence

from slurm_gpushare.errors import BadInput

# Not ours to take: what cannot be caught, what a fault of our own raises, and what the terminal's job control needs.
_LEFT_ALONE = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU, signal.SIGXFSZ,
}  # fmt: skip
_WATCHED = signal.valid_signals() - _LEFT_ALONE
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as every shell and env(1) have it


class CannotRun(BadInput):
    """The command does not exist or cannot be executed."""

    def __init__(self, command: str, error: OSError) -> None:
        super().__init__(f"{command}: {error.strerror}")
        self.shell_code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


class Command:
    """A running command. Make it before any thread, since signals are blocked from then on."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._status: int | None = None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            self._child = subprocess.Popen(
                argv,
                env=dict(environ),
                close_fds=False,  # descriptors that our caller passed are meant for the command
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            )
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            raise CannotRun(argv[0], error) from error
        self.pid = self._child.pid

    @property
    def ended(self) -> bool:
        return self._status is not None

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it: 128 and more for a signal; None while it runs."""
        if self._status is None:
            return None
        code = os.waitstatus_to_exitcode(self._status)
        return 128 - code if code < 0 else code

    def wait(self, seconds: float) -> bool:
        """Pass signals on for so long, or until the command ends; whether SIGUSR1 told that the epoch is over."""
        info = signal.sigtimedwait(_WATCHED, max(0.0, seconds))
        if info is None:
            return False
        if info.si_signo == signal.SIGCHLD:
            self._look()
        elif info.si_signo == signal.SIGUSR1:
            return True
        elif info.si_code <= 0 and info.si_pid != self.pid:
            # From kill(2). What the terminal sends (Ctrl-C) comes from the kernel, and the command has it already.
            self._pass_on(info.si_signo)
        return False

    def _pass_on(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return  # it has just ended: SIGCHLD is on its way

    def _look(self) -> None:
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                os.kill(os.getpid(), signal.SIGSTOP)  # the shell waits for us, so we stop when the command does
            else:
                self._status = status

    def finish(self) -> int:
        """The command's exit code; if a signal killed it, the same signal kills us."""
        assert self._status is not None
        self._child.returncode = os.waitstatus_to_exitcode(self._status)
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file, the command's, is enough
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            os.kill(os.getpid(), number)
        return self._child.returncode
