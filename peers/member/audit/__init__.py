"""A member under audit: what it notes of each step and shows when it is asked, and a member's step computed again."""

from peers.member.audit.replay import Raw, again
from peers.member.audit.witness import StepWitness

__all__ = ["Raw", "StepWitness", "again"]
