"""Fewer bytes between stages: how activations and gradients are written for the wire, and how far off they come back.

The idea: a codec is two pure functions, tensor to bytes and back. The number of bytes is known from type and count alone.
So before a receiver spends memory, the receiver knows what must come. Codecs form a ladder: int4, int8, bf16, none. A
tensor that does not suit its rung climbs: a tensor that is not finite, or comes out too far off, travels by a better codec.
"""

from meshcee.codec.base import Codec, is_coded
from meshcee.codec.coder import Coder, Measured, noise_seed
from meshcee.codec.ladder import CODECS, LADDER, accepted, codec_of

__all__ = ["CODECS", "LADDER", "Codec", "Coder", "Measured", "accepted", "codec_of", "is_coded", "noise_seed"]
