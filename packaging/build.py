"""Build the wheel, the Debian packages and the RPMs into dist/: see packaging/README.md."""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slurm_gpushare.site.units import UnitSite, unit_pieces  # noqa: E402 - of this checkout

HERE = ROOT / "packaging"
LIB = Path("usr/lib/slurm-gpushare")
NODE = ("click>=8.1", "nvidia-ml-py>=12", "psutil>=5.9")
CONTROLLER = ("jinja2>=3.0", "numpy>=1.24", "scikit-learn>=1.3", "scipy>=1.10", "sqlalchemy>=2.0", "pymysql>=1.1")
# The oldest first: pure Python libraries are chosen for it and serve the others too.
DEBIAN_PYTHONS = ("3.11", "3.13")  # of Debian 12 and 13
RPM_PYTHONS = ("3.12",)  # Enterprise Linux 9 has it beside its own, 10 as its own
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")
SUMMARY = "Let two training jobs share one GPU under Slurm"
TEXT = {
    "slurm-gpushare": "The command, the node's scripts and the submit hook: for compute and login nodes.",
    "slurm-gpushare-controller": "The libraries that the helper needs: for the machine on which slurmctld runs.",
}


@dataclass(frozen=True)
class Package:
    """A package's name, the libraries in it, and which of our scripts it runs."""

    name: str
    requirements: tuple[str, ...]
    suffix: str  # of its scripts' names

    def script(self, kind: str) -> Path | None:
        path = HERE / "scripts" / f"{kind}{self.suffix}"
        return path if path.exists() else None


PACKAGES = (Package("slurm-gpushare", NODE, ""), Package("slurm-gpushare-controller", CONTROLLER, "-controller"))


def run(*argv: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in argv], check=False, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"dist: error: {argv[0]}: exit {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return str(done.stdout)


def version() -> str:
    found = re.search(r'__version__ = "([^"]+)"', (ROOT / "slurm_gpushare/__init__.py").read_text())
    assert found is not None
    return found[1]


def build_wheel(out: Path) -> Path:
    """From a copy, since building leaves files behind."""
    with tempfile.TemporaryDirectory() as top:
        source = Path(top, "source")
        files = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").split("\n")
        for name in files:
            if name and (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / name)
        run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", top, source)
        (wheel,) = Path(top).glob("*.whl")
        shutil.copy(wheel, out)
    return out / wheel.name


def bill_of_materials(out: Path) -> Path | None:
    """The software bill of materials, where this checkout can write one."""
    script, path = ROOT / "scripts/sbom.py", out / "slurm-gpushare.cdx.json"
    if not script.exists():
        return None
    run(sys.executable, script, path)
    return path


def foreign(python: str) -> list[str]:
    """pip's options for another Python than the one that runs it."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    digits = python.replace(".", "")
    abis = ["--abi", f"cp{digits}", "--abi", "abi3", "--abi", "none"]
    return ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *abis, *platforms]


def is_for_all(wheel: Path) -> bool:
    """Whether one file serves every Python."""
    return "-none-any" in wheel.name or "-abi3-" in wheel.name


def download(requirements: Sequence[str], python: str, to: Path, source: Path | None, pins: Path) -> list[Path]:
    to.mkdir(parents=True)
    offline = ["--no-index", "--find-links", source] if source else []
    run(*PIP, "download", *foreign(python), *offline, "-c", pins, "-d", to, *requirements)
    return sorted(to.glob("*.whl"))


def install(wheels: Iterable[Path], python: str, target: Path) -> None:
    found = list(wheels)
    if found:
        # pip install compares Requires-Python with its own Python, not with --python-version; download has done it.
        unasked = ["--no-deps", "--no-compile", "--no-index", "--ignore-requires-python"]
        run(*PIP, "install", *unasked, *foreign(python), "--target", target, *found)
        shutil.rmtree(target / "bin", ignore_errors=True)  # f2py and its like


def libraries(package: Package, pythons: Sequence[str], tree: Path, own: Path, source: Path | None, work: Path) -> None:
    """The package's libraries below `tree`: common/ for all Pythons, lib/python3.X/site-packages for one."""
    pins = work / "pins"
    pins.touch()
    have: set[str] = {name.split("-")[0].lower() for name in pins.read_text().split()}
    for python in pythons:
        wheels = download(package.requirements, python, work / package.name / python, source, pins)
        common = [wheel for wheel in wheels if is_for_all(wheel)]
        new = [wheel for wheel in common if wheel.name.split("-")[0].lower() not in have]
        install(new, python, tree / LIB / "common")
        have |= {wheel.name.split("-")[0].lower() for wheel in new}
        with pins.open("a") as file:
            file.writelines("{}=={}\n".format(*wheel.name.split("-")[:2]) for wheel in new)
        site = tree / LIB / f"lib/python{python}/site-packages"
        site.mkdir(parents=True, exist_ok=True)
        install((wheel for wheel in wheels if not is_for_all(wheel)), python, site)
    if not package.suffix:
        install([own], pythons[0], tree / LIB / "common")


def environment(tree: Path, pythons: Sequence[str], interpreter: str) -> None:
    """bin/python, pyvenv.cfg and the line in each site-packages that leads to common/."""
    (tree / LIB / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (tree / LIB / "bin" / name).symlink_to(interpreter)
    (tree / LIB / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    for python in pythons:
        (tree / LIB / f"lib/python{python}/site-packages/gpushare-common.pth").write_text(f"/{LIB}/common\n")
    command = tree / "usr/bin/gpushare"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/{LIB}/bin/python -I\nfrom slurm_gpushare.__main__ import main\n\nmain()\n")
    command.chmod(0o755)


def documents(tree: Path, sbom: Path | None) -> None:
    """Units, man pages, completion and examples where the system looks for them."""
    share = ROOT / "share"
    places = {
        "completion/gpushare.bash": "bash-completion/completions/gpushare",
        "completion/_gpushare": "zsh/vendor-completions/_gpushare",
        "completion/gpushare.fish": "fish/vendor_completions.d/gpushare.fish",
    }
    for source, target in places.items():
        copy(share / source, tree / "usr/share" / target)
    for piece in unit_pieces(UnitSite(Path("/usr/bin/gpushare"), "slurm")):
        unit = tree / "usr/lib/systemd/system" / Path(piece.name).name
        copy(share / piece.name, unit)
        unit.write_text(piece.text)
    for page in sorted((share / "man").iterdir()):
        target = tree / f"usr/share/man/man{page.suffix[1:]}/{page.name}.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    docs = tree / "usr/share/doc/slurm-gpushare"
    for name in ("README.md", "CHANGELOG.md"):
        copy(ROOT / name, docs / name)
    copy(ROOT / "LICENSE", docs / "copyright")
    for path in sorted((share / "examples").iterdir()):
        copy(path, docs / "examples" / path.name)
    copy(share / "grafana/gpushare.json", docs / "examples/grafana-dashboard.json")
    copy(share / "prometheus/gpushare.rules.yml", docs / "examples/prometheus.rules.yml")
    if sbom:
        copy(sbom, docs / sbom.name)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o644)


def owned_by_root(tree: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


def debian(package: Package, tree: Path, number: str, out: Path, work: Path) -> Path:
    del work
    control = tree / "DEBIAN"
    control.mkdir()
    depends = {
        "": "python3 (>= 3.11), python3 (<< 3.14), munge",
        "-controller": f"slurm-gpushare (= {number}), lua-sql-sqlite3",
    }[package.suffix]
    size_kib = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file() and not path.is_symlink()) // 1024
    (control / "control").write_text(
        f"Package: {package.name}\nVersion: {number}\nArchitecture: amd64\nSection: admin\nPriority: optional\n"
        f"Maintainer: slurm-gpushare developers <slurm-gpushare@localhost>\nInstalled-Size: {size_kib}\n"
        f"Depends: {depends}\nDescription: {SUMMARY}\n {TEXT[package.name]}\n"
    )
    for kind in ("postinst", "prerm", "postrm"):
        if script := package.script(kind):
            shutil.copy(script, control / kind)
            (control / kind).chmod(0o755)
    deb = out / f"{package.name}_{number}_amd64.deb"
    # Debian 12's dpkg reads zstd, and it takes a tenth of xz's time to write.
    run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z9", "--build", tree, deb)
    return deb


def rpm(package: Package, tree: Path, number: str, out: Path, work: Path) -> Path:
    requires = {
        "": f"munge\nRequires: /usr/bin/python{RPM_PYTHONS[0]}",
        "-controller": f"slurm-gpushare = {number}",
    }[package.suffix]
    parts = []
    for kind, section in (("postinst", "post"), ("prerm", "preun")):
        if script := package.script(kind):
            parts.append(f"%{section}\n" + "\n".join(script.read_text().splitlines()[1:]) + "\n")
    top = sorted(f'"/{path.relative_to(tree)}"' for path in tree.rglob("*") if not path.is_dir() or path.is_symlink())
    # Directories of our own, or a removal would leave them behind.
    shared = ("doc/slurm-gpushare", "fish/vendor_completions.d", "zsh/vendor-completions")
    owned = (tree / LIB, *(tree / "usr/share" / name for name in shared))
    own = [path for directory in owned for path in (directory, *directory.rglob("*"))]
    top += sorted(f'%dir "/{path.relative_to(tree)}"' for path in own if path.is_dir() and not path.is_symlink())
    spec = work / f"{package.name}.spec"
    spec.write_text(
        f"Name: {package.name}\nVersion: {number}\nRelease: 1\nSummary: {SUMMARY}\nLicense: Apache-2.0\n"
        f"Requires: {requires}\nAutoReqProv: no\n"
        "%global __os_install_post %{nil}\n%global debug_package %{nil}\n%define _build_id_links none\n"
        "%define _binary_payload w9.zstdio\n"
        f"%description\n{TEXT[package.name]}\n"
        f"%install\ncp -a {tree}/. %{{buildroot}}/\n"
        + "".join(parts)
        + "%files\n%defattr(-,root,root)\n"
        + "".join(f"{name}\n" for name in top)
    )
    run("rpmbuild", "-bb", "--target", "x86_64", "--define", f"_topdir {work}/rpm", "--define", f"_rpmdir {out}",
        "--define", "_build_name_fmt %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm", spec)  # fmt: skip
    return out / f"{package.name}-{number}-1.x86_64.rpm"


def interpreter(pythons: Sequence[str], kind: str) -> str:
    """Debian's python3 is the one that the package serves; elsewhere it may be too old."""
    return "/usr/bin/python3" if kind == "deb" else f"/usr/bin/python{pythons[0]}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kinds", nargs="*", help="wheel, deb, rpm: what to build (default: all)")
    options.add_argument("--out", type=Path, default=ROOT / "dist")
    options.add_argument("--wheels", type=Path, help="take libraries from this directory instead of PyPI")
    options.add_argument("--version", default=version(), help="the packages' version")
    options.add_argument("--node-only", action="store_true", help="only the small package, for a quick look")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)
    own = build_wheel(given.out)
    print(own)
    sbom = bill_of_materials(given.out)
    for kind, pythons in (("deb", DEBIAN_PYTHONS), ("rpm", RPM_PYTHONS)):
        if given.kinds and kind not in given.kinds:
            continue
        with tempfile.TemporaryDirectory() as top:
            work = Path(top)
            for package in PACKAGES[: 1 if given.node_only else None]:
                tree = work / f"{package.name}.tree"
                libraries(package, pythons, tree, own, given.wheels, work)
                if not package.suffix:
                    environment(tree, pythons, interpreter(pythons, kind))
                    documents(tree, sbom)
                owned_by_root(tree)
                build = {"deb": debian, "rpm": rpm}[kind]
                print(build(package, tree, given.version, given.out, work))


if __name__ == "__main__":
    main()
