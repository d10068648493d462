"""Installs a 64-bit Arm Python into a folder, for `make test-arm`: python tests/arm/install.py build/arm

The interpreter and its libraries are packages of this machine's Debian or Ubuntu. apt fetches them with a state of its
own, and they are extracted without being installed. Python packages are wheels from PyPI. FOLDER/python runs the
interpreter under qemu. What is there already is kept. Standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}  # and their Debian packages
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libpython3-dev", "libstdc++6")
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))

# A child process started as sys.executable runs under qemu too.
SITE_CUSTOMIZE = "import sys\n\nsys.executable = {python!r}\n"
RUN_PYTHON = """#!/bin/sh
export PYTHONPATH="{site}${{PYTHONPATH:+:$PYTHONPATH}}"
exec qemu-aarch64 -cpu "${{QEMU_CPU:-max,sve=off,pauth-impdef=on}}" -L "{root}" "{interpreter}" "$@"
"""


def check_tools() -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        sys.exit(f"The tests for 64-bit Arm need packages of Debian or Ubuntu: apt-get install {' '.join(missing)}")


def run(*command: str | Path, log: Path) -> None:
    """Run a command. If it fails, show what it wrote."""
    with log.open("w") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if status != 0:
        sys.exit(f"{log.read_text()}\n{' '.join(map(str, command))} failed with status {status}.")


def fetch_packages(folder: Path) -> list[Path]:
    """The packages of the interpreter and all that they depend on."""
    state, cache = folder / "apt/state", folder / "apt/cache"
    for place in (state / "lists/partial", cache / "archives/partial"):
        place.mkdir(parents=True, exist_ok=True)
    status = state / "status"
    status.touch()
    options = [
        f"Dir::State={state}",
        f"Dir::State::status={status}",
        f"Dir::Cache={cache}",
        "APT::Architecture=arm64",
        "APT::Architectures::=arm64",
        "APT::Install-Recommends=false",
        "Debug::NoLocking=true",
    ]
    apt = ["apt-get", "-y", *(word for option in options for word in ("-o", option))]
    run(*apt, "update", log=folder / "apt/update.log")
    run(*apt, "install", "--download-only", *PACKAGES, log=folder / "apt/download.log")
    return sorted((cache / "archives").glob("*.deb"))


def extract(packages: list[Path], root: Path) -> None:
    """A root with the packages' files. Debian's newer ones have /lib in /usr/lib only."""
    unfinished = root.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", package, unfinished], check=True)
    if not (unfinished / "lib").exists():
        (unfinished / "lib").symlink_to("usr/lib")
    unfinished.rename(root)


def find_interpreter(root: Path) -> Path:
    return next(path for path in sorted((root / "usr/bin").glob("python3.*")) if path.name[8:].isdigit())


def install_wheels(folder: Path, version: str) -> None:
    """The wheels of requirements.txt. The stamp is a copy of that file."""
    site, wanted, stamp = folder / "site", HERE / "requirements.txt", folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted.read_text():
        return
    shutil.rmtree(site, ignore_errors=True)
    pinned = folder / "constraints.txt"
    lines = (HERE.parents[1] / "constraints.txt").read_text().splitlines()
    pinned.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary=:all:", "--python-version", version]
    places = [word for platform in PLATFORMS for word in ("--platform", platform)]
    run(*command, *places, "--target", site, "-c", pinned, "-r", wanted, log=folder / "pip.log")
    stamp.write_text(wanted.read_text())


def write_scripts(folder: Path, interpreter: Path) -> None:
    python, site = folder / "python", folder / "site"
    python.write_text(RUN_PYTHON.format(site=site, root=folder / "root", interpreter=interpreter))
    python.chmod(0o755)
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE.format(python=str(python)))


def install(folder: Path) -> None:
    check_tools()
    root = folder / "root"
    if not root.exists():
        folder.mkdir(parents=True, exist_ok=True)
        extract(fetch_packages(folder), root)
    interpreter = find_interpreter(root)
    install_wheels(folder, interpreter.name.removeprefix("python"))
    write_scripts(folder, interpreter)


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute())
