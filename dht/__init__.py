"""What the mesh remembers: signed records, who is alive by them, who coordinates, and word of changes.

`Directory` says who is there, `Elector` who plans, `SharedMemory` keeps records; so does `dht.kademlia`, over hivemind. What
arrives is read field by field and believed only when it is signed. Imports meshcee's values; knows nothing of jobs in progress.
"""

from dht.addresses import MAX_ADDRESSES, checked, dialable, host_of, is_public, peer_of, told_private
from dht.directory import Directory, read_lists
from dht.election import Elector
from dht.gossip import MAX_RUMOURS, Gossiper
from dht.membership import CERTIFICATE_S, ENROL, RENEWED_AFTER_S, Certificate, Members, RevokedList, by_invite, certify
from dht.records import (
    MAX_DATASETS,
    MAX_LINKS,
    MAX_REVOKED,
    LeaseRecord,
    LinkRecord,
    PeerRecord,
    RevokedRecord,
    RunRecord,
    dated,
    learn_list,
    seal,
)
from dht.signing import ROLES, Grant, Identity, MeshKey, Role, Token, invite_key, public_key_of, verify
from dht.store import MemoryStore, SharedMemory, Store
from dht.terms import Term, TermFile

__all__ = [
    "CERTIFICATE_S",
    "ENROL",
    "MAX_ADDRESSES",
    "MAX_DATASETS",
    "MAX_LINKS",
    "MAX_REVOKED",
    "MAX_RUMOURS",
    "RENEWED_AFTER_S",
    "ROLES",
    "Certificate",
    "Directory",
    "Elector",
    "Gossiper",
    "Grant",
    "Identity",
    "LeaseRecord",
    "LinkRecord",
    "Members",
    "MemoryStore",
    "MeshKey",
    "PeerRecord",
    "RevokedList",
    "RevokedRecord",
    "Role",
    "RunRecord",
    "SharedMemory",
    "Store",
    "Term",
    "TermFile",
    "Token",
    "by_invite",
    "certify",
    "checked",
    "dated",
    "dialable",
    "host_of",
    "invite_key",
    "is_public",
    "learn_list",
    "peer_of",
    "public_key_of",
    "read_lists",
    "seal",
    "told_private",
    "verify",
]
