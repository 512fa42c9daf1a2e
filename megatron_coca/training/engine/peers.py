"""Detect under any launcher that another rank has ended, and end this process before its collectives time out.

Most launchers stop all other processes when one dies. Processes that are started by hand, by mpirun, or by srun without
`--kill-on-bad-exit` have no such launcher: they may wait in a collective or for a store entry until a timeout of
several minutes.
"""

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from uuid import uuid4

from megatron_coca.work.statuses import FAILED

logger = logging.getLogger(__name__)

GRACE = 20.0
"""Seconds from the loss of a rank to the exit of the other ranks, unless their own errors end them earlier."""
POLL = 1.0
CONNECT_SECONDS = 10.0
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Keepalive settings: a host that does not answer for 25 s is lost. A host answers even if the process is suspended."""
LONGEST_LINE = 1024
FAREWELL = "bye"
LOST = "lost "


class KeyValueStore(Protocol):
    """The methods of a `torch.distributed` store that this module uses."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Peers:
    """Connections between rank 0 and every other rank. They stay open while the processes run.

    If a connection closes without a farewell message, the process at its other end has died. Rank 0 then informs the
    other ranks. Each rank has `GRACE` seconds to end by itself; after that it exits with a message and status FAILED.

    Attributes:
        lost: the rank that died and its host, as text; None while all ranks run.
    """

    def __init__(self, rank: int, grace: float = GRACE, end: Callable[[int], object] = os._exit) -> None:
        """`end` is called with the exit status to end the process."""
        self.lost: str | None = None
        self._name, self._rank = f"rank {rank} on {socket.gethostname()}", rank
        self._grace, self._end = grace, end
        self._found, self._over = threading.Event(), threading.Event()
        self._members: dict[socket.socket, str] = {}
        self._watches = False

    def join(self, store: KeyValueStore, address: str, loopback: bool) -> None:
        """Connect to rank 0, which listens at `address`. Every rank must call this once. A failure is logged as a
        warning; after that, a lost rank is detected only by timeouts.
        """
        try:
            if self._rank == 0:
                self._start(store, loopback)
            else:
                self._connect(store, address)
        except OSError as error:
            logger.warning("%s: no connection to rank 0 (%s); a lost rank is detected only later", self._name, error)

    def _start(self, store: KeyValueStore, loopback: bool) -> None:
        try:
            listener = _listen(loopback)
        except OSError:
            store.set("peers", "")  # the other ranks wait for this entry
            raise
        secret = uuid4().hex
        store.set("peers", f"{listener.getsockname()[1]} {secret} {socket.gethostname()}")
        self._watch(lambda: self._serve(listener, secret))

    def _connect(self, store: KeyValueStore, address: str) -> None:
        text = store.get("peers").decode()
        if not text:
            raise ConnectionRefusedError("rank 0 does not listen")
        port, secret, host = text.split()
        connection = socket.create_connection((address, int(port)), timeout=CONNECT_SECONDS)
        _keep_alive(connection)
        connection.sendall(f"{secret} {self._name}\n".encode())
        connection.settimeout(POLL)
        self._members = {connection: f"rank 0 on {host}"}
        self._watch(lambda: self._listen_to(connection))

    def _watch(self, work: Callable[[], None]) -> None:
        self._watches = True
        threading.Thread(target=work, name="peers", daemon=True).start()

    def explain(self, error: BaseException) -> None:
        """If a rank is lost, add a note to the error, because the loss may have caused the error."""
        if self._watches and self._found.wait(POLL):
            error.add_note(f"{self.lost} had already ended; see the message of that rank")

    def leave(self, orderly: bool) -> None:
        """Close the connections, with a farewell message if this rank ended normally."""
        self._over.set()
        for connection in list(self._members):
            with suppress(OSError):
                if orderly:
                    connection.sendall(f"{FAREWELL}\n".encode())
                connection.shutdown(socket.SHUT_RDWR)  # a reading thread would delay `close`
            connection.close()

    def _serve(self, listener: socket.socket, secret: str) -> None:
        """On rank 0: accept the connections of the other ranks, and wait until one of these processes dies."""
        begun: dict[socket.socket, str] = {}
        with listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._over.is_set() and self.lost is None:
                for key, _ in selector.select(POLL):
                    if key.fileobj is listener:
                        connection, _ = listener.accept()
                        _keep_alive(connection)
                        begun[connection] = ""
                        selector.register(connection, selectors.EVENT_READ)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    text, ended = _received(key.fileobj)
                    begun[key.fileobj] += text
                    *lines, begun[key.fileobj] = begun[key.fileobj].split("\n")
                    for line in lines:
                        if line == FAREWELL:
                            self._members.pop(key.fileobj, None)
                        elif line.startswith(f"{secret} "):
                            self._members[key.fileobj] = line.removeprefix(f"{secret} ")
                    if ended or len(begun[key.fileobj]) > LONGEST_LINE:
                        selector.unregister(key.fileobj)
                        if (name := self._members.pop(key.fileobj, None)) is not None:
                            self._lose(name)
        self._end_if_lost()

    def _listen_to(self, connection: socket.socket) -> None:
        """On other ranks: wait until rank 0 dies, or until it reports a lost rank."""
        begun = ""
        while not self._over.is_set() and self.lost is None:
            text, ended = _received(connection)
            *lines, begun = (begun + text).split("\n")
            if FAREWELL in lines:
                return
            told = [line.removeprefix(LOST) for line in lines if line.startswith(LOST)]
            if told or ended:
                self._lose(told[0] if told else self._members[connection])
        self._end_if_lost()

    def _lose(self, name: str) -> None:
        if self._over.is_set():
            return
        self.lost = name
        self._found.set()
        if self._rank == 0:
            for connection in list(self._members):
                with suppress(OSError):
                    connection.sendall(f"{LOST}{name}\n".encode())

    def _end_if_lost(self) -> None:
        if self.lost is None or self._over.wait(self._grace):
            return
        message = (
            f"{self._name}: {self.lost} has ended, but this process is still waiting for it; see the message of that "
            "rank, and restart all processes with --auto-resume\n"
        )
        os.write(2, message.encode())
        self._end(FAILED)


def _listen(loopback: bool) -> socket.socket:
    """Listen on a free port of the loopback interface or of all interfaces."""
    if loopback:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _received(connection: socket.socket) -> tuple[str, bool]:
    """Return the received text and whether the connection has ended."""
    try:
        data = connection.recv(LONGEST_LINE)
    except TimeoutError:
        return "", False
    except OSError:
        return "", True
    return data.decode(errors="replace"), not data
