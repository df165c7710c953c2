"""An owner that audits: it chooses steps of members in secret, has them computed again, and says who has lied."""

from peers.owner.audit.auditing import Auditing, Court, Judge
from peers.owner.audit.judges import check_judges, own_class

__all__ = ["Auditing", "Court", "Judge", "check_judges", "own_class"]
