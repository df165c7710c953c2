"""How a machine on the same network joins by a short code: found by multicast DNS, the code exchanged for an invite.

The code never travels: both sides prove that they know it by SPAKE2 (the library `spake2`). A wing; imported by name.
"""

from peers.node.nearby.code import Code, CodeWindow
from peers.node.nearby.door import Door, Ending, ask
from peers.node.nearby.lan import Found, announced, browse, fresh_label

__all__ = ["Code", "CodeWindow", "Door", "Ending", "Found", "announced", "ask", "browse", "fresh_label"]
