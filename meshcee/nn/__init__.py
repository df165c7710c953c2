"""Modules for models that others have trained: frozen weights in 4 or 8 bits, of operators that every peer has.

The room is a wing: nothing else imports it, and a peer needs nothing of it.
"""

from meshcee.nn.quantized import QuantizedEmbedding, QuantizedLinear, quantize_frozen

__all__ = ["QuantizedEmbedding", "QuantizedLinear", "quantize_frozen"]
