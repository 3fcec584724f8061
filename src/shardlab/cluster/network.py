"""This host's place in the network: which host it is, where it listens, and by which interface it is reached."""

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def this_machine() -> str:
    """The same text for processes that can reach each other by the loopback interface and share a clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def listen(port: int, *, here_only: bool) -> socket.socket:
    """A listening socket, for this host alone or on every address. Raises OSError if the port is taken."""
    if here_only:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel that was told to do without IPv6
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Whether a host's name or address means the host itself, to whoever asks."""
    return address == "localhost" or address == "::1" or address.startswith("127.")


def interface_of(address: str) -> str | None:
    """The interface of this host that has the address, as gloo wants it named; None if none is found."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return None


def _addresses(interface: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            if name == interface:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
