"""What an audit holds a member to: its proof of a step, the digest of a frame, which steps are audited, and what that finds."""

from meshcee.audit.proof import SIGNED, Edge, Proof, Tally, chance, chosen, frame_digest, key_of, root_of, unequal

__all__ = ["SIGNED", "Edge", "Proof", "Tally", "chance", "chosen", "frame_digest", "key_of", "root_of", "unequal"]
