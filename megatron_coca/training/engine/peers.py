"""Notice that another rank has ended, with any launcher, and end this process before its collectives time out.

A launcher that sees a process die stops the others. Without one (processes started by hand, by mpirun or srun without
`--kill-on-bad-exit`), the others may wait in a collective, or for an entry of the store, until a timeout of minutes.
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

from megatron_coca.training.exit_status import FAILED

logger = logging.getLogger(__name__)

GRACE = 20.0
"""Seconds from the loss of a rank to the exit of the others. Their own errors may end them earlier."""
POLL = 1.0
CONNECT_SECONDS = 10.0
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that does not answer for 25 s is lost. The kernel answers even for a suspended process."""
LONGEST_LINE = 1024
FAREWELL = "bye"
LOST = "lost "


class Store(Protocol):
    """The methods of a `torch.distributed` store that are used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Peers:
    """A connection of every rank to rank 0, for as long as the processes run.

    A connection that ends without a farewell means that the process at its other end has ended. Rank 0 tells the other
    ranks. Each has `GRACE` seconds to end by itself; after that it exits with a message and the status FAILED.

    Attributes:
        lost: the rank that ended and its host, as text; None while all ranks run.
    """

    def __init__(self, rank: int, grace: float = GRACE, end: Callable[[int], object] = os._exit) -> None:
        """`end` exits with a status."""
        self.lost: str | None = None
        self._name, self._rank = f"rank {rank} on {socket.gethostname()}", rank
        self._grace, self._end = grace, end
        self._found, self._over = threading.Event(), threading.Event()
        self._members: dict[socket.socket, str] = {}
        self._watches = False

    def join(self, store: Store, address: str, loopback: bool) -> None:
        """Connect to rank 0, which listens at `address`; every rank must call it once. After a failure, which is logged
        as a warning, a lost rank is noticed only by timeouts.
        """
        try:
            if self._rank == 0:
                self._start(store, loopback)
            else:
                self._connect(store, address)
        except OSError as error:
            logger.warning("%s: no connection to rank 0 (%s); the loss of a rank is noticed later", self._name, error)

    def _start(self, store: Store, loopback: bool) -> None:
        try:
            listener = _listen(loopback)
        except OSError:
            store.set("peers", "")  # the others wait for it
            raise
        secret = uuid4().hex
        store.set("peers", f"{listener.getsockname()[1]} {secret} {socket.gethostname()}")
        self._watch(lambda: self._serve(listener, secret))

    def _connect(self, store: Store, address: str) -> None:
        text = store.get("peers").decode()
        if not text:
            raise ConnectionRefusedError("it does not listen")
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
        """Name the lost rank in a note on an error that may be its consequence."""
        if self._watches and self._found.wait(POLL):
            error.add_note(f"{self.lost} had ended before; see its message")

    def leave(self, orderly: bool) -> None:
        """Close the connections, with a farewell if the run of this rank ended in an orderly way."""
        self._over.set()
        for connection in list(self._members):
            with suppress(OSError):
                if orderly:
                    connection.sendall(f"{FAREWELL}\n".encode())
                connection.shutdown(socket.SHUT_RDWR)  # a thread that is reading would delay `close`
            connection.close()

    def _serve(self, listener: socket.socket, secret: str) -> None:
        """On rank 0: accept the connections of the other ranks, and wait for the end of one of them."""
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
        """On other ranks: wait for the end of rank 0, or for its message that a rank is lost."""
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
            f"{self._name}: {self.lost} has ended, and this process still waits for it; read the message of that rank, "
            "and start all processes again with --auto-resume\n"
        )
        os.write(2, message.encode())
        self._end(FAILED)


def _listen(loopback: bool) -> socket.socket:
    """Listen on a free port, of the loopback interface or of all."""
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
    """Return the text that has arrived, and True if the connection has ended."""
    try:
        data = connection.recv(LONGEST_LINE)
    except TimeoutError:
        return "", False
    except OSError:
        return "", True
    return data.decode(errors="replace"), not data
