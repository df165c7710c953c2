"""Network namespaces and TUN devices of Linux, by system calls: nothing has to be installed.

The idea: a namespace has no name and no file. It lives as long as the router holds it open or a process is inside, so the
kernel itself removes it, whatever happened. A TUN device belongs to whoever opened it and goes with him.
Standard library only: the launcher `enter.py` must start in milliseconds.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "DEVICE",
    "congestion_control",
    "enter",
    "inside",
    "new_namespace",
    "own_namespace",
    "start_ticks",
    "tun",
    "why_not",
]

DEVICE = "lab0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8916, 0x891C, 0x8922, 0x8943
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_QUEUE_PACKETS = 2000
# The namespace's own settings: as on a Linux machine that nobody has tuned, whatever this one has been set to.
_SETTINGS = {
    "ipv4/tcp_rmem": "4096 131072 6291456",
    "ipv4/tcp_wmem": "4096 16384 4194304",
    "ipv4/tcp_no_metrics_save": "1",  # a run does not learn from the one before
    "ipv6/conf/all/disable_ipv6": "1",
}


def why_not() -> str | None:
    """Why no lab can run here, as the end of a sentence; None when one can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if os.geteuid() != 0:
        return "it needs root, for network namespaces; try sudo"
    if not os.path.exists("/dev/net/tun"):
        return "it needs /dev/net/tun; load the module tun, or start the container with --device /dev/net/tun"
    child = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-I", "-S", __file__])
    return None if child == 0 else "it needs the capability to make network namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN)"


def congestion_control() -> str:
    """Of TCP in this namespace. A namespace inherits the machine's, and may not take every other one, so it is reported."""
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def own_namespace() -> int:
    """An open file that is this process's network namespace."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace: int) -> None:
    """Move this process (if it has one thread) into the network namespace of an open file."""
    _call("setns", namespace, _CLONE_NEWNET)


def new_namespace() -> int:
    """Move this process into a new network namespace with nothing but a loopback device; the open file of it."""
    _call("unshare", _CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        _up(control, "lo")
    for name, value in _SETTINGS.items():
        path = Path("/proc/sys/net", name)
        if path.exists():  # a kernel may lack one, e.g. all of IPv6
            path.write_text(value)
    return own_namespace()


def tun(address: str, prefix: int, mtu: int, device: str = DEVICE) -> int:
    """A TUN device in this process's namespace, up, with this address; its packets are read from the file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = device.encode()
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN | _IFF_NO_PI))
        mask = socket.inet_ntoa(struct.pack("!I", (0xFFFFFFFF << max(0, 32 - prefix)) & 0xFFFFFFFF))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si20x", name, mtu))
            fcntl.ioctl(control, _SIOCSIFTXQLEN, struct.pack("16si20x", name, _QUEUE_PACKETS))
            for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, mask)) if ":" not in address else ():
                data = struct.pack("16sH2x4s16x", name, socket.AF_INET, socket.inet_aton(value))
                fcntl.ioctl(control, request, data)
            _up(control, device)
            if ":" in address:
                _give_ipv6(device, address, prefix)
    except BaseException:
        os.close(file)
        raise
    return file


def _give_ipv6(device: str, address: str, prefix: int) -> None:
    """To a device that is up. It has no neighbours to ask whether the address is free, so it holds at once."""
    Path(f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6").write_text("0")
    data = struct.pack("16sIi", socket.inet_pton(socket.AF_INET6, address), prefix, socket.if_nametoindex(device))
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFADDR, data)


def _up(control: socket.socket, device: str) -> None:
    request = struct.pack("16sH22x", device.encode(), 0)
    (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
    fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags | _IFF_UP))


def inside(namespaces: Iterable[int]) -> list[int]:
    """The ids of the processes whose network namespace is one of these open files."""
    wanted = {(stat.st_dev, stat.st_ino) for stat in map(os.fstat, namespaces)}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = os.stat(f"/proc/{entry}/ns/net")
            except OSError:
                continue  # it has just ended
            if (stat.st_dev, stat.st_ino) in wanted:
                found.append(int(entry))
    return found


def start_ticks(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks: with its id, what names it for ever. None when it is gone."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]


if __name__ == "__main__":  # the trial of `why_not`, in a process of its own
    try:
        new_namespace()
        os.close(tun("10.77.0.1", 16, 1500))
    except OSError:
        sys.exit(1)
