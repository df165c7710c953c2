"""What the mesh remembers: signed records, who is alive by them, who coordinates, and word of changes.

`Directory` says who is there, `Elector` who plans, `SharedMemory` keeps records; so does `dht.kademlia`, over hivemind. What
arrives is read field by field and believed only when it is signed. Imports meshcee's values; knows nothing of jobs in progress.
"""

from dht.addresses import MAX_ADDRESSES, checked, dialable, host_of, peer_of
from dht.directory import Directory
from dht.election import Elector
from dht.gossip import MAX_RUMOURS, Gossiper
from dht.records import MAX_LINKS, LeaseRecord, LinkRecord, PeerRecord, RunRecord
from dht.signing import Identity, MeshKey, Token, verify
from dht.store import MemoryStore, SharedMemory, Store
from dht.terms import Term, TermFile

__all__ = [
    "MAX_ADDRESSES",
    "MAX_LINKS",
    "MAX_RUMOURS",
    "Directory",
    "Elector",
    "Gossiper",
    "Identity",
    "LeaseRecord",
    "LinkRecord",
    "MemoryStore",
    "MeshKey",
    "PeerRecord",
    "RunRecord",
    "SharedMemory",
    "Store",
    "Term",
    "TermFile",
    "Token",
    "checked",
    "dialable",
    "host_of",
    "peer_of",
    "verify",
]
