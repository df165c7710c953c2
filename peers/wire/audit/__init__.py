"""What crosses between an owner that audits and a member: the evidence of one step."""

from peers.wire.audit.evidence import Evidence, Said, State, most_bytes, statement
from peers.wire.audit.signing import Delegate, signed_by

__all__ = ["Delegate", "Evidence", "Said", "State", "most_bytes", "signed_by", "statement"]
