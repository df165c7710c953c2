"""What a run does from epoch to epoch, whatever befalls its members: events in, commands out (course, moves). Pure.

`peers/owner/` carries the commands out.
"""

from meshcee.epochs import course, moves

__all__ = ["course", "moves"]
