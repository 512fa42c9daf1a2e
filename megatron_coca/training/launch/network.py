"""Ports and interfaces of this host."""

import contextlib
import fcntl
import random
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h


FIRST_PORT, LAST_PORT = 20000, 32767
"""Below the range that Linux takes ports of outgoing connections from: seconds pass until the first process listens,
and in that time any connection of the machine could be given a port from within it.
"""


def free_port() -> int:
    """A port of this host that nobody listens on, chosen at random so that two runs hardly choose the same.

    Raises:
        OSError: there is none.
    """
    for port in random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT + 1), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"none of 100 ports between {FIRST_PORT} and {LAST_PORT} is free")


def interface_towards(address: str) -> str | None:
    """The name of the interface whose IPv4 address this host has for `address`; None where that cannot be found out.

    Gloo would take the one that the host's own name stands for, and on many machines that is the loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing; any port will do
        except OSError:
            return None
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address(probe, name) == own), None)


def _address(probe: socket.socket, interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None
