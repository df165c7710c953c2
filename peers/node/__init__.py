"""A peer as a whole: what runs in it, how it is put together, how it leaves, and the mesh as Python code sees it (`Mesh`).

`Agent` owns every task in one TaskGroup; `in_process` hands it a transport and a store. Imported by name: `assemble`, which does so
on real machines, `departure`, and who may be a member (`founding`, `admission`, `authority`).
"""

from peers.node.early import JoinOptions
from peers.node.in_process import join
from peers.node.mesh import Mesh, Result

__all__ = ["JoinOptions", "Mesh", "Result", "join"]
