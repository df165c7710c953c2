"""Models that are larger than the machine that describes them: how each tensor is made, sent in place of the tensor.

A recipe is a few calls of initialising operators over storages of stated size, checked like a program.
"""

from meshcee.capture.recipes.constructor import construct
from meshcee.capture.recipes.initial import from_checkpoint
from meshcee.capture.recipes.recipe import decode

__all__ = ["construct", "decode", "from_checkpoint"]
