"""`meshcee doctor`: what is well on this machine, what is not, and the command that mends it.

Facts are gathered thinly and judged purely: `machine`, `mesh` and `exactness` look, `judge` decides, `command` prints.
"""

from peers.cli.doctor.command import run_doctor

__all__ = ["run_doctor"]
