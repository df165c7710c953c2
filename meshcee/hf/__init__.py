"""Hugging Face, as people write it: `from meshcee.hf import Trainer` in a script of transformers, and `join=` or `local=`.

The room is a wing: nothing else imports it. It asks for transformers when a Trainer is made.
"""

from meshcee.hf.trainer import Trainer

__all__ = ["Trainer"]
