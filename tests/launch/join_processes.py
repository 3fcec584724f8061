"""Starting the launchers of a job: by torchrun, as srun would, and on two network namespaces as on two hosts."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch_processes import HERE, Launcher

from shardlab.cluster.network import free_port

COMMAND = str(HERE / "join_command.py")

SHORT = ["strategy=ddp", "trainer.steps=4", "trainer.eval_batches=1", "model.n_layers=1", "tracking=none"]
"""A run of four steps on all ranks; it takes a second."""

TORCHRUN = "import sys, runpy; runpy.run_module('torch.distributed.run', run_name='__main__', alter_sys=True)"
ALONE = f"import sys, runpy; sys.argv[0] = {COMMAND!r}; runpy.run_path({COMMAND!r}, run_name='__main__')"

SECONDS = 150.0
"""More than any of these takes on a busy machine."""


def torchrun(folder: Path, *words: str, ranks: int = 2, options: Sequence[str] = ()) -> Launcher:
    """`torchrun --nproc-per-node=RANKS shardlab train WORDS` in a folder."""
    options = options or [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return Launcher(TORCHRUN, folder, *options, COMMAND, "train", *words)


def launcher_of(launcher: Launcher, rank: int) -> int:
    """The process id of a rank's launcher, of those that torchrun has started."""
    for process in launcher.descendants():
        entry = Path("/proc", str(process))
        words = (entry / "cmdline").read_bytes().split(b"\0")
        environment = (entry / "environ").read_bytes().split(b"\0")
        if COMMAND.encode() in words[1:3] and f"RANK={rank}".encode() in environment:
            return process
    raise AssertionError(f"no launcher of rank {rank}: {launcher.output}")


def lines(launcher: Launcher, text: str) -> list[str]:
    """What it has printed that holds the text."""
    return [line for line in launcher.output.splitlines() if text in line]


class TwoHosts:
    """Two network namespaces with one cable between them, each with a host name of its own."""

    def __init__(self, mark: str) -> None:
        self.names = [f"shardlab-{mark}-{end}" for end in "ab"]
        self.cables = [f"sl{mark}{end}" for end in "ab"]
        self.addresses = ["10.231.17.1", "10.231.17.2"]

    def make(self) -> None:
        """Make them; raises CalledProcessError where that isn't allowed."""
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable: no packet goes through, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", self.cables[1], "down")

    def start(self, host: int, code: str, folder: Path, *words: str) -> Launcher:
        """Run Python code on a host; it is one process and those that come from it."""
        inner = f"import socket; socket.sethostname('host-{'ab'[host]}')\n{code}"
        outer = (
            "import os, sys; os.execvp('unshare', ['unshare', '--uts', 'ip', 'netns', 'exec', "
            f"{self.names[host]!r}, sys.executable, '-c', {inner!r}, *sys.argv[1:]])"
        )
        folder.mkdir(exist_ok=True)
        launcher = Launcher(outer, folder, *words)
        return launcher

    def remove(self) -> None:
        """Take them away; the cable goes with its ends."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def why_no_hosts() -> str:
    """Why two hosts can't be had here; empty if they can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "needs the commands ip (iproute2) and unshare (util-linux)"
    hosts = TwoHosts(uuid.uuid4().hex[:6])
    try:
        hosts.make()
    except subprocess.CalledProcessError as error:
        return f"may not make network namespaces: {error.stderr.strip()}"
    finally:
        hosts.remove()
    return ""


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts for the time of the context."""
    hosts = TwoHosts(uuid.uuid4().hex[:6])
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def kill_all(*launchers: Launcher) -> None:
    """End whatever is left of them."""
    for launcher in launchers:
        launcher.kill()


def send(process: int, name: str) -> None:
    """Send a signal by its name."""
    os.kill(process, signal.Signals[name])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
