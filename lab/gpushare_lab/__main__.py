"""``gpushare-lab``: Ctrl-C ends it without a word from the first moment on, as it does `gpushare`."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """The console script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gpushare_lab.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
