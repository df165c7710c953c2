"""An owner whose data is elsewhere: it finds the peer that has the set, and says which samples each step has."""

from peers.owner.supplier.supplier import Supplier
from peers.owner.supplier.supply import Supply

__all__ = ["Supplier", "Supply"]
