"""Peers that a command starts on this machine, `meshcee demo` and `meshcee local`: they end with the command.

`Children` starts and ends them. On Linux each is a copy of one process that has imported torch (copies.py, source.py), so a peer
is there in a second; elsewhere each imports for itself. `die_with_parent` is a child's first act.
"""

from peers.cli.children.children import Children, die_with_parent

__all__ = ["Children", "die_with_parent"]
