"""The side of a job that lends a device: takes an offer, builds its stage, runs until the owner is done.

`Member` serves, `Executor` runs steps by the local rule, settlement ends each step. No user code is run here.
"""

from peers.member.service import Member

__all__ = ["Member"]
