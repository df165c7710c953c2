"""The router process: makes the namespaces, carries every packet between them, and is what keeps them alive.

The idea: one process, one loop, no threads. It reads packets from each namespace's TUN device, hands them to `Queues`, and
writes them to the device of their destination when they arrive. It is asked over its standard input, one JSON object a
line; when that ends, however the lab ended, it kills what still runs inside and goes, and the namespaces go with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
from typing import Any

from benchmarks.lab.namespaces import DEVICE, congestion_control, enter, inside, new_namespace, own_namespace, tun
from benchmarks.lab.nat import Nat
from benchmarks.lab.network import PREFIX, PREFIX6, Link, Network, nat_address
from benchmarks.lab.queues import Queues

_BURST = 32  # packets from one device before the others have their turn
_PRIORITY = -10  # a late router would be measured instead of the network
_IPV4, _IPV6 = 4, 6
_TARGET = {_IPV4: slice(16, 20), _IPV6: slice(24, 40)}  # of a packet
_TCP, _SYN, _ACK = 6, 0x02, 0x10


class Router:
    def __init__(self, network: Network, mtu: int, seed: int) -> None:
        self.queues = Queues(network, seed=seed)
        self.namespaces: list[int] = []
        self._devices: list[int] = []
        self._mtu = mtu
        home = own_namespace()
        names = [host.name for host in network.hosts]
        for place, host in enumerate(network.hosts):
            if host.inside:
                self.namespaces.append(self.namespaces[names.index(host.inside)])
                enter(self.namespaces[place])
            else:
                self.namespaces.append(new_namespace())
            prefix, number = PREFIX6 if host.ipv6 else PREFIX, network.device(place)
            self._devices.append(tun(network.address(place), prefix, mtu, f"{DEVICE[:-1]}{number}"))
        self.congestion_control = congestion_control()
        enter(home)
        os.close(home)
        self._places = {_packed(network.address(place)): place for place in range(len(network.hosts))}
        self._closed = {place: host.closed for place, host in enumerate(network.hosts) if host.closed}
        routers = list(dict.fromkeys(host.behind for host in network.hosts if host.behind))
        self._nats = {name: Nat(nat_address(place)) for place, name in enumerate(routers)}
        self._nat_at = {nat.address: nat for nat in self._nats.values()}
        self._behind = [host.behind for host in network.hosts]
        self.refused = 0  # packets that a device did not take

    def run(self) -> None:
        """Until standard input ends."""
        clock, queues, devices = time.monotonic, self.queues, self._devices
        places = {device: place for place, device in enumerate(devices)}
        watched = [0, *devices]
        lines = b""
        while True:
            due = queues.next_due()
            ready, _, _ = select.select(watched, [], [], None if due is None else max(0.0, due - clock()))
            for device in ready:
                if device:
                    self._read(device, places[device])
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *whole, lines = (lines + data).split(b"\n")
                for line in whole:
                    self._answer(json.loads(line))
            for place, packet in queues.arrived(clock()):
                try:
                    os.write(devices[place], packet)
                except OSError:
                    self.refused += 1

    def _read(self, device: int, source: int) -> None:
        queues, places, size = self.queues, self._places, self._mtu + 64
        now = time.monotonic()
        for _ in range(_BURST):
            try:
                packet = os.read(device, size)
            except BlockingIOError:
                return
            version = packet[0] >> 4
            if version not in _TARGET:
                continue
            if self._nats and version == _IPV4 and (packet := self._translated(source, packet) or b"") == b"":
                continue
            target = places.get(packet[_TARGET[version]])
            if target is not None and not (target in self._closed and _dials(packet) in self._closed[target]):
                queues.put(now, source, target, packet)

    def _translated(self, source: int, packet: bytes) -> bytes | None:
        """What the routers with translation on the way make of it; None when they do not let it pass."""
        target, behind = self._places.get(packet[16:20]), self._behind[source]
        if target is not None and self._behind[target]:  # an address that means nothing elsewhere
            return packet if self._behind[target] == behind else None
        if behind and (went := self._nats[behind].out(packet)) is not None:
            packet = went
        elif behind:
            return None
        nat = self._nat_at.get(packet[16:20])
        return packet if nat is None else nat.into(packet)

    def _answer(self, request: dict[str, Any]) -> None:
        what = request["do"]
        if what == "trace":
            self.queues.start_trace(time.monotonic())
        elif what == "reset":
            self.queues.reset()
        elif what == "set":
            self.queues.set(Link(**request["link"]))
        answer = {"lines": self.queues.stats(), "refused": self.refused, "cpu_s": time.process_time()}
        print(json.dumps(answer if what == "stats" else {"done": what}), flush=True)

    def kill_inside(self) -> None:
        """Until nothing is left: a process may start another one while we look."""
        while left := inside(self.namespaces):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def _dials(packet: bytes) -> int:
    """The TCP port that a packet asks to be connected with; 0 for any other packet."""
    begins, kind = ((packet[0] & 15) * 4, packet[9]) if packet[0] >> 4 == _IPV4 else (40, packet[6])
    if kind != _TCP or len(packet) < begins + 14 or packet[begins + 13] & (_SYN | _ACK) != _SYN:
        return 0
    return int.from_bytes(packet[begins + 2 : begins + 4], "big")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the lab's to handle
    # Byte by byte: what follows the first line is for `run`, and must not wait in a buffer.
    order = json.loads(b"".join(iter(lambda: os.read(0, 1), b"\n")))
    router = Router(Network.from_json(order["network"]), order["mtu"], order["seed"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    gc.freeze()
    gc.disable()  # packets make no cycles, and a collection is a hiccup of the whole network
    ready = {"pid": os.getpid(), "namespaces": router.namespaces, "congestion_control": router.congestion_control}
    print(json.dumps(ready), flush=True)
    try:
        router.run()
    finally:
        router.kill_inside()


if __name__ == "__main__":
    main()
