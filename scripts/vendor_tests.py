"""SchedMD's own tests on plain Slurm and on Slurm with us: which of them notice.

vendor_tests.py SOURCE [OUT] [PATTERN]

SOURCE is a tree of Slurm's source, of a release that a testbed has (its META says which); nothing of it comes with this
repository. From 25.11 on releases come without tests: take the commit of master from which the release's branch began.
The python tests run with --local-config, which leaves Slurm's configuration alone, and the expect tests of GPUs, arrays
and heterogeneous jobs as they are; PATTERN limits them by name. A test whose result is another one with us is run twice
more on both. Exit code 3 where one still differs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from gpushare_lab.testbed.layout import Shape
from gpushare_lab.testbed.testbed import Testbed

from slurm_gpushare.protocol.errors import Exit, GpushareError

SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
EXPECT = re.compile(r"test(28|38|39)\.\d+")
PYTHON = "/usr/bin/python3"  # Debian's, which has the modules that the tests need
WORDS = {"PASSED": "passed", "SUCCESS": "passed", "SKIPPED": "skipped"}
TEST_S = 180
"""A test that takes longer has failed; python tests that are run together and take longer are run one by one."""
AT_ONCE = 10
"""Python tests that one process runs."""
TRIES = 2
"""How often a test is run again whose result differs."""


def release_of(source: Path) -> str:
    """``24.11`` from the tree's META."""
    meta = source / "META"
    found = re.search(r"Version:\s*(\d+\.\d+)", meta.read_text() if meta.is_file() else "")
    if found is None or found[1] not in SUITES:
        raise GpushareError(
            f"{source}: no source tree of Slurm {', '.join(SUITES)}", "Say where one is: SLURM_SOURCE=DIR."
        )
    if not (source / "testsuite/expect").is_dir():
        raise GpushareError(f"{source}: it has no tests", "From 25.11 on they are on Slurm's master branch alone.")
    return found[1]


def groups_of(source: Path, pattern: str) -> list[list[str]]:
    """Names of tests that are run together: expect tests one by one, python tests a few at a time."""
    expect = [path.name for path in sorted((source / "testsuite/expect").iterdir()) if EXPECT.fullmatch(path.name)]
    python = [path.name for path in sorted((source / "testsuite/python/tests").glob("test_*.py"))]
    expect, python = ([name for name in names if re.search(pattern, name)] for names in (expect, python))
    return [*([name] for name in expect), *(python[at : at + AT_ONCE] for at in range(0, len(python), AT_ONCE))]


class Bed:
    """A testbed, as an installed Slurm for tests that run on the machine's own side, in a copy of their own."""

    def __init__(self, bed: Testbed, source: Path) -> None:
        conf = bed.dir / "testsuite.conf"
        self._tests = bed.dir / "testsuite"
        shutil.copytree(source / "testsuite", self._tests)
        dirs = {"Source": source, "Build": source, "Install": bed.dir, "Config": bed.layout.etc}
        conf.write_text("".join(f"Slurm{name}Dir={path}\n" for name, path in dirs.items()))
        self._bed = bed
        self._env = {**bed.env, "SLURM_TESTSUITE_CONF": str(conf)}

    def run(self, tests: Sequence[str]) -> dict[str, str]:
        """``passed``, ``failed`` or ``skipped``, by what is tested. All are python tests, or it is one other."""
        is_python = tests[0].endswith(".py")
        pytest = [
            PYTHON,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--local-config",
            "--no-color",
            "-rA",
            "--tb=no",
        ]
        of_python = [*pytest, f"--basetemp={self._bed.dir}/pytest", *(f"tests/{name}" for name in tests)]
        try:
            done = subprocess.run(
                of_python if is_python else [f"./{tests[0]}"],
                cwd=self._tests / ("python" if is_python else "expect"), env=self._env, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=TEST_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            if len(tests) == 1:
                return {tests[0]: "failed"}
            return {name: word for test in tests for name, word in self.run([test]).items()}
        finally:
            self._clear()
        if not is_python:
            ended = re.findall(r"(?m)^(SUCCESS|SKIPPED)\s+: test", done.stdout)
            return {tests[0]: WORDS.get(ended[-1] if ended else "", "failed")}
        found = re.findall(r"(?m)^(PASSED|FAILED|ERROR|SKIPPED)(?: \[\d+\])? (?:tests/)?(\S+)", done.stdout)
        if not found:
            raise GpushareError(f"pytest ran none of {' '.join(tests)}: {' '.join(done.stdout.split()[-30:])}")
        return {re.sub(r":\d+:$", "", name): WORDS.get(word, "failed") for word, name in found}

    def _clear(self) -> None:
        """Nothing that a test has left may meet the next."""
        self._bed.run(["scancel", "--quiet", "--user=root"], check=False)
        for node in self._bed.shape.node_names:
            self._bed.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)


@dataclass
class Comparison:
    """Results on plain Slurm and with us, by what is tested, and what was not the same at each try."""

    plain: dict[str, str] = field(default_factory=dict)
    wired: dict[str, str] = field(default_factory=dict)
    unstable: set[str] = field(default_factory=set)

    def different(self, names: Iterable[str]) -> list[str]:
        """Those of the tests of which a result is another one with us."""
        odd = {_file(name) for name in {*self.plain, *self.wired} if self.plain.get(name) != self.wired.get(name)}
        return [test for test in names if test in odd]

    def take(self, tests: Sequence[str], plain: Mapping[str, str], wired: Mapping[str, str]) -> None:
        """Results of a try of these tests, in place of those of the last."""
        for known, found in ((self.plain, plain), (self.wired, wired)):
            before = {name: known.pop(name) for name in list(known) if _file(name) in tests}
            self.unstable |= {name for name, word in found.items() if before.get(name, word) != word}
            known.update(found)


def _file(name: str) -> str:
    """Of what is tested: ``test_101_1.py::test_help`` is in ``test_101_1.py``."""
    return name.partition(":")[0]


def main(source: Path, out: Path | None, pattern: str) -> int:
    release = release_of(source)
    suite = SUITES[release]
    seen = Comparison()
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as top, ThreadPoolExecutor(2) as pool:
        Path(top).chmod(0o755)
        found = [Testbed(Path(top, name)) for name in ("plain", "wired")]
        try:
            for bed in found:
                bed.up(Shape(nodes=4, gpus=2), accounting=True, suite=suite, plain=bed is found[0])
            beds = [Bed(bed, source) for bed in found]
            for group in groups_of(source, pattern):
                wanted = group
                for _ in range(1 + TRIES):
                    if wanted:
                        seen.take(wanted, *pool.map(lambda bed, names=tuple(wanted): bed.run(names), beds))
                    wanted = seen.different(wanted)
                print(f"{' '.join(group)}: {wanted or 'the same'}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("interrupted: what follows is of the tests so far", file=sys.stderr)
        finally:
            for bed in found:
                bed.down(purge=True)
    names = sorted({*seen.plain, *seen.wired})
    both = Counter(seen.plain[name] for name in names if seen.plain.get(name) == seen.wired.get(name))
    differ = [name for name in names if seen.plain.get(name) != seen.wired.get(name)]
    rows = [f"{name}: {seen.plain.get(name, '---')} -> {seen.wired.get(name, '---')}" for name in differ]
    text = (
        f"Slurm {release}: on both {both['passed']} passed, {both['failed']} failed, {both['skipped']} skipped.\n"
        f"Unstable: {', '.join(sorted(seen.unstable)) or 'none'}.\n"
        + "".join(f"{row}\n" for row in rows or ["None differs."])
    )
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    return Exit.PROBLEMS if differ else Exit.OK


if __name__ == "__main__":
    given = [*sys.argv[1:], "", ""]
    try:
        sys.exit(main(Path(given[0]).resolve(), Path(given[1]) if given[1] else None, given[2]))
    except GpushareError as error:
        sys.exit(f"vendor_tests: {error}")
