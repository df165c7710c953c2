"""What code of the user's can reach and write in Python's objects, so that a look at it leaves nothing behind.

The door: `Content` is what one object holds by itself, and `Backup` is that as it is now. `Remembered` is all that a model and
its loss reach, `Reached` what other objects do. `is_users` tells whose code something is, and `names_in` what code names.
"""

from meshcee.reach.code import is_users, method_of, names_in, slots_of
from meshcee.reach.content import RANDOM, Backup, Content, attribute_of, content_of, variable_of
from meshcee.reach.remember import Reached, Remembered

__all__ = [
    "RANDOM",
    "Backup",
    "Content",
    "Reached",
    "Remembered",
    "attribute_of",
    "content_of",
    "is_users",
    "method_of",
    "names_in",
    "slots_of",
    "variable_of",
]
