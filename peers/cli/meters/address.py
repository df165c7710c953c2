"""Where `--metrics` listens, and whether what it needs is installed.

The idea: both are told of before anything starts; without an address in front of the port, only this machine can ask.
"""

from __future__ import annotations

import importlib.util
import re

from meshcee.errors import UsageError

__all__ = ["address_of"]


def address_of(text: str | None) -> tuple[str, int] | None:
    """ "127.0.0.1:9464", "[::1]:9464" or "9464" on loopback. UsageError for anything else, and without the library."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]:|([\w.-]*):)?([0-9]{1,5})", text.strip())
    if match is None or int(match[3]) > 65535:
        raise UsageError(f"--metrics {text!r:.60} is no address: write for example 127.0.0.1:9464")
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError("--metrics needs a library that is not installed here: pip install 'meshcee[metrics]'")
    return match[1] or match[2] or "127.0.0.1", int(match[3])
