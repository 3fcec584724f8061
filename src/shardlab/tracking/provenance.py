"""Where a run came from: the code, the packages, the machine, the data, and the command.

Written once, before the run starts, by the launcher. It takes a few milliseconds and imports none of the packages
whose versions it notes. No password reaches it: see `without_credentials`.
"""

import functools
import getpass
import hashlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping
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


# Hydra's own sweeper escapes a job's words, `http\://me\:secret@host`, and JSON and YAML double its backslashes.
_CREDENTIALS = re.compile(r"""([A-Za-z][\w+.-]*\\*://)(?:[^\s/'"\\]|\\+(?:[^\\@]|(?=@)))*@""")


def without_credentials(text: str) -> str:
    """The text with `user:password@` taken out of every URI in it, escaped ones included."""
    return _CREDENTIALS.sub(r"\1", text)


def redact_file(path: Path) -> None:
    """Rewrite a text file of another program's without credentials, whole or not at all; nothing if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    shown = without_credentials(text)
    if shown != text:
        new = path.with_name(f".{path.name}.{time.monotonic_ns()}")
        new.write_text(shown, encoding="utf-8")
        new.replace(path)


def provenance(
    *,
    run_id: str,
    name: str,
    overrides: list[str],
    choices: dict[str, str],
    config_hash: str,
    data: Any,
    sweep: Path | None = None,
    job: int | None = None,
    own_overrides: str | None = None,
) -> dict[str, Any]:
    """What is written to provenance.json: plain values.

    run_id, name: of the run; overrides, choices, config_hash: of its config; data: dataset's name and fingerprint
    sweep, job, own_overrides: of a sweep's job: the sweep's folder, its number in it, and what tells it from the others
    """
    return {
        "id": run_id,
        "name": name,
        "started": time.time(),
        "command": [without_credentials(word) for word in sys.argv],
        "overrides": [without_credentials(word) for word in overrides],
        "choices": choices,
        "config_hash": config_hash,
        "sweep": None if sweep is None else str(sweep),
        "job": job,
        "own_overrides": None if own_overrides is None else without_credentials(own_overrides),
        "data": data,
        "folder": os.getcwd(),
        "user": user(),
        "versions": {"python": platform.python_version(), **_versions()},
        "source_sha256": source_checksum(),
        **launcher(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def launcher() -> dict[str, Any]:
    """Which process this is, so that another command can tell whether it still lives: see `lives`.

    host, pid; pid_started: clock ticks from the machine's start to the process's, for ids are used again; boot_id:
    tells one start of the machine from the next; pid_namespace: a container's, in which ids count by themselves
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": process_started(os.getpid()),
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
    }


def lives(process: Mapping[str, Any]) -> bool | None:
    """Whether the process of `launcher` lives, its values being texts or numbers. None: this machine can't know."""
    try:
        pid, host, boot = int(process["pid"]), process["host"], process["boot_id"]
    except (KeyError, ValueError, TypeError):
        return None
    if host != socket.gethostname() or not boot:
        return None
    if boot != boot_id():
        return False
    if process.get("pid_namespace", _pid_namespace()) != _pid_namespace():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    started = process_started(pid)
    if started is None:  # a system that hides the processes of others
        return True
    return str(process.get("pid_started") or started) == str(started) and not _is_zombie(pid)


def process_started(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; None where the system doesn't tell."""
    fields = _process_fields(pid)
    return int(fields[19]) if fields else None  # field 22, of which the first two are cut off


def _is_zombie(pid: int) -> bool:
    """Whether it has ended, and only its parent hasn't noticed."""
    return _process_fields(pid)[:1] == ["Z"]


def _process_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the process's name, which may hold spaces and brackets."""
    return _first_line(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


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


@functools.cache
def source_checksum() -> str:
    """sha256 over the package's Python files: which code ran, be it installed, edited or uncommitted.

    Read once a process, which goes on running that code whatever becomes of the files.
    """
    package = Path(__file__).parents[1]
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return total.hexdigest()


@functools.cache
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
