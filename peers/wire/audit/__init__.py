"""What crosses between an owner that audits and a member: the evidence of one step."""

from peers.wire.audit.evidence import Evidence, Said, State, most_bytes, statement

__all__ = ["Evidence", "Said", "State", "most_bytes", "statement"]
