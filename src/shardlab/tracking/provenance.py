"""Where a run came from: the code, the packages, the machine, the data, and the command.

Written once, before the run starts, by the launcher. It takes a few milliseconds and imports none of the packages
whose versions it notes. No password reaches it: see `without_credentials`.
"""

import getpass
import hashlib
import os
import platform
import re
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "shardlab",
    "torch",
    "hydra-core",
    "omegaconf",
    "torchtext",
    "torchdata",
    "mlflow",
    "tokenizers",
    "numpy",
    "safetensors",
)


def without_credentials(text: str) -> str:
    """The text with `user:password@` taken out of every URI in it."""
    return re.sub(r"([A-Za-z][\w+.-]*://)[^\s/'\"]*@", r"\1", text)


def provenance(*, run_id: str, name: str, overrides: list[str], choices: dict[str, str], data: Any) -> dict[str, Any]:
    """What is written to provenance.json: plain values.

    run_id, name: of the run; overrides, choices: of its config; data: dataset's name and fingerprint
    """
    return {
        "id": run_id,
        "name": name,
        "started": time.time(),
        "command": [without_credentials(word) for word in sys.argv],
        "overrides": [without_credentials(word) for word in overrides],
        "choices": choices,
        "data": data,
        "folder": os.getcwd(),
        "user": user(),
        "versions": {"python": platform.python_version(), **_versions()},
        "source_sha256": source_checksum(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def user() -> str:
    """Name of the user; in a container whose user has none, the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def boot_id() -> str:
    """Tells one start of this machine from the next, so that a process id can be trusted; "" where unknown."""
    return _first_line(Path("/proc/sys/kernel/random/boot_id"))


def cpu_model() -> str:
    """The processor's name as the kernel has it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def source_checksum() -> str:
    """sha256 over the package's Python files: which code ran, be it installed, edited or uncommitted."""
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
