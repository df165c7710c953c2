"""`meshcee members`, `invite`, `token` and `revoke`: who belongs to the mesh, and who does not any more."""

from peers.cli.members.commands import run_invite, run_members, run_revoke

__all__ = ["run_invite", "run_members", "run_revoke"]
