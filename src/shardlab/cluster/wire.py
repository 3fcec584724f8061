"""What lead and followers say to each other, and how each notices that the other has gone.

A message is a JSON object with its length in front, on a plain TCP connection. Nothing that comes from the network is
ever unpickled or named for import. Both sides say something at least every BEAT_SECONDS, so silence means that the
other process, its host or the way there is lost: a cut cable sends no goodbye.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

BEAT_SECONDS = 1.0

LARGEST = 16 * 2**20
"""Bytes of a message: a config or a traceback takes a few thousand."""

LARGEST_HELLO = 2**16
"""Of the first one, which may come from a stranger."""

_LENGTH = struct.Struct("!I")

Message = dict[str, Any]
"""`kind` says what it is; the other keys are the kind's own."""


class WireError(Exception):
    """What came is no message, or only a part of one."""


class Link:
    """One side of a connection. Sending is for any thread, receiving for one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()
        self._received = bytearray()

    @property
    def here(self) -> str:
        """The address of this end, as its host knows it."""
        return str(self._socket.getsockname()[0]).removeprefix("::ffff:")

    def send(self, kind: str, **values: Any) -> None:
        """Send one message. Raises OSError if the connection is broken."""
        body = json.dumps({"kind": kind, **values}).encode()
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, seconds: float, largest: int = LARGEST) -> Message | None:
        """The next message, or None if none has come whole within that time.

        Raises EOFError if the other side has closed; WireError for what is no message; OSError.
        """
        deadline = time.monotonic() + seconds
        while (message := self._whole(largest)) is None:
            if not wait([self._socket], max(0.0, deadline - time.monotonic())):
                return None
            received = self._socket.recv(2**16)
            if not received and self._received:
                raise WireError(f"the connection ended {len(self._received)} bytes into a message")
            if not received:
                raise EOFError("the connection was closed")
            self._received += received
        return message

    def _whole(self, largest: int) -> Message | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > largest:
            raise WireError(f"a message of {length} bytes; at most {largest} are taken")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise WireError("a message that is no JSON") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise WireError("a message without a kind")
        return message

    def attend(
        self, heard: Callable[[Message], None], lost: Callable[[str, float], None], patience: Callable[[], float]
    ) -> None:
        """From now on, in a thread: hand over every message, and beat, until the other side is lost.

        lost: called once, with what happened ("nothing was heard from it for 60 s") and since when, in seconds of the
        monotonic clock; patience: seconds of silence
        """
        threading.Thread(target=self._attend, args=(heard, lost, patience), name="wire", daemon=True).start()

    def _attend(
        self, heard: Callable[[Message], None], lost: Callable[[str, float], None], patience: Callable[[], float]
    ) -> None:
        last_heard = last_beat = time.monotonic()
        try:
            while True:
                if time.monotonic() - last_beat >= BEAT_SECONDS:
                    last_beat = time.monotonic()
                    self.send("beat")
                message = self.receive(BEAT_SECONDS / 2)
                if message is not None:
                    last_heard = time.monotonic()
                    if message["kind"] != "beat":
                        heard(message)
                elif (silent := time.monotonic() - last_heard) > patience():
                    lost(f"nothing was heard from it for {silent:.0f} s", last_heard)
                    break
        except (EOFError, ConnectionResetError, BrokenPipeError):  # reset: it left something unread
            lost("its launcher has gone", last_heard)
        except (OSError, WireError, KeyError, TypeError, ValueError) as error:
            lost(f"the connection to it broke ({getattr(error, 'strerror', None) or error})", last_heard)
        self.close()

    def close(self) -> None:
        """End the connection; whoever sends or receives on it fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
