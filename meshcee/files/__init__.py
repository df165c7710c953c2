"""Files of this machine: one writer whose files are whole or absent (disk), and where runs and identities lie (home).
Also JSON that every parser reads, tensors in safetensors (tensor_files), weights as Hugging Face keeps them.

Everything may import this room; it knows no mesh. `home` and what needs torch, `tensor_files` and
`hugging_face`, are imported by name.
"""

from meshcee.files.memory import large_apart, settled
from meshcee.files.strict_json import dumps, loads, number
from meshcee.files.trouble import Trouble

__all__ = ["Trouble", "dumps", "large_apart", "loads", "number", "settled"]
