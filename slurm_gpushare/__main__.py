"""``gpushare``: Ctrl-C ends it without a word from the first moment on, while modules are still being read too."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from slurm_gpushare.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
