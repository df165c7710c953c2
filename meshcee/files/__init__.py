"""Files of this machine: one writer whose files are whole or absent (disk), and where runs and identities lie (home).
Also JSON that every parser reads, tensors in safetensors (tensor_files), weights as Hugging Face keeps them.

Everything may import this room; it knows no mesh. `tensor_files` and `hugging_face` need torch and are imported by name.
"""

from meshcee.files.home import Home, Run, is_locked, under
from meshcee.files.memory import large_apart, settled
from meshcee.files.strict_json import dumps, loads, number
from meshcee.files.trouble import Trouble

__all__ = ["Home", "Run", "Trouble", "dumps", "is_locked", "large_apart", "loads", "number", "settled", "under"]
