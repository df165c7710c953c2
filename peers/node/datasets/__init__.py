"""Data at its place: sets that a peer's owner has registered, read by a process of their own, for jobs that name them.

The peer sends samples to the members that need them. An owner sends indices, and sees no sample.
"""

from peers.node.datasets.dataset import Dataset, Datasets
from peers.node.datasets.service import DataService

__all__ = ["DataService", "Dataset", "Datasets"]
