"""A wide-area network on one machine, for any command: see lab.py; `python -m benchmarks.lab --help`."""

from benchmarks.lab.lab import Lab
from benchmarks.lab.namespaces import DEVICE, why_not
from benchmarks.lab.network import Change, Host, Link, Network, pair_of_hosts

__all__ = ["DEVICE", "Change", "Host", "Lab", "Link", "Network", "pair_of_hosts", "why_not"]
