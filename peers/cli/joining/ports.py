"""What makes a peer behind a router reachable, in the words of a person: the ports to let in, and its options."""

from __future__ import annotations

__all__ = ["opened"]


def opened(port: int = 4001, place: str = "PUBLIC-ADDRESS", tensors: int | None = None) -> tuple[str, str]:
    """What to let in at a router, and the options of the peer behind it. `place` is an address; `tensors` is the port for these."""
    second = tensors or (port + 1 if port < 65535 else port - 1)
    listen = f"0.0.0.0:{port}"
    if ":" in place:  # a peer listens on IPv4 alone where nothing else is said
        listen, place = f"'{listen},[::]:{port}'", f"[{place}]"
    return f"TCP ports {port} and {second}", f"--listen {listen} --announce {place}:{port} --direct-port {second}"
