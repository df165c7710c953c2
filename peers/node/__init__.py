"""A peer as a whole: what runs in it, how it is put together, how it leaves, and the mesh as Python code sees it (`Mesh`).

`Agent` owns every task in one TaskGroup; `assemble` hands it a transport and a store. Who may be a member is a wing: `founding`,
`admission` and `authority` are imported by name.
"""

from peers.node.assemble import JoinOptions, a_peer, join
from peers.node.departure import Departure, ask_to_leave, find_peer
from peers.node.mesh import Mesh, Result

__all__ = ["Departure", "JoinOptions", "Mesh", "Result", "a_peer", "ask_to_leave", "find_peer", "join"]
