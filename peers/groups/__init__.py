"""Sums of gradients inside a group or over pipelines: over the members' own streams, or through a torch process group. Statistics
of batches are folded over pipelines.
"""

from peers.groups.buckets import FinishedBuckets
from peers.groups.chain_statistics import ChainStatistics
from peers.groups.chain_sum import ChainSum
from peers.groups.collective import GroupSum
from peers.groups.direct_sum import DirectSum

__all__ = ["ChainStatistics", "ChainSum", "DirectSum", "FinishedBuckets", "GroupSum"]
