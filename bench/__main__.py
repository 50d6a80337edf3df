"""``python -m bench [NAME ...]``: run the benchmarks, all of them by default. Results go to out/bench."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(names: list[str]) -> None:
    here = Path(__file__).parent
    known = sorted(path.stem.removeprefix("bench_") for path in here.glob("bench_*.py"))
    if unknown := set(names) - set(known):
        sys.exit(f"bench: error: no benchmark {', '.join(sorted(unknown))}. There are: {', '.join(known)}.")
    out = here.parent / "out" / "bench"
    out.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        print(f"\n== {name} ==", flush=True)
        importlib.import_module(f"bench.bench_{name}").main(out)


main(sys.argv[1:])
