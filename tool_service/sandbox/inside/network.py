"""The network of a sandbox, its loopback: how much of the kernel's memory it can hold.

What is sent and not yet read lies in the kernel, in no process's size, and a socket need not even have a descriptor for
it: connections that nobody has accepted have none, nor have those whose client has closed. So buffers keep the sizes
that they begin with (see syscalls.py for SO_SNDBUF and SO_RCVBUF), and sockets are counted.
"""

import contextlib

SETTINGS = {
    "net.core.somaxconn": "128",
    "net.ipv4.tcp_rmem": "4096 131072 131072",
    "net.ipv4.tcp_wmem": "4096 16384 131072",
}
"""Of a network namespace. TCP's own limits would let one connection have 10 MiB and more, and one sandbox all that the
machine gives to TCP."""
_SOCKET_BYTES = 256 << 10
"""What one can hold: TCP's buffers as set here; of other families, one of the kernel's usual size (208 KiB) or little
more."""


def restrict() -> None:
    """Set the network namespace of this process up. Needs a /proc with all that is in it."""
    for name, value in SETTINGS.items():
        with open(f"/proc/sys/{name.replace('.', '/')}", "w", encoding="ascii") as file:
            file.write(value)


def most_bytes_held() -> int:
    """By all sockets in the network namespace of this process; 0 where the kernel has no count of them, as gVisor's."""
    with contextlib.suppress(FileNotFoundError), open("/proc/self/net/sockstat", "rb", buffering=0) as file:
        return int(file.read(64).split(maxsplit=3)[2]) * _SOCKET_BYTES  # sockets: used N
    return 0
