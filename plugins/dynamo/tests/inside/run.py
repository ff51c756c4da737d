"""Switches the loopback device on and runs a file of checks: `python run.py FILE`."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

import pytest

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def switch_on(device: bytes) -> None:
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", device, 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)
        request = struct.pack("16sH14x", device, flags | IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


if __name__ == "__main__":
    assert len(socket.if_nameindex()) == 1, "not in a network of its own"
    switch_on(b"lo")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "python_files=check_*.py"]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))
