"""The codecs by name, from the fewest bytes to the exact ones.

The idea: what is not fit for a rung climbs, so a peer that was told of a codec must accept that one and those above it. What
cannot be packed travels by the rung that it was packed behind.
"""

from __future__ import annotations

from meshcee.codec.base import Codec, Plain
from meshcee.codec.blocks import Int4, Int8
from meshcee.codec.cast import Bf16
from meshcee.codec.lossless import Lossless
from meshcee.errors import UsageError

__all__ = ["CODECS", "LADDER", "accepted", "codec_of"]

LADDER: tuple[Codec, ...] = (Int4(), Int8(), Bf16(), Plain())
CODECS: dict[str, Codec] = {codec.name: codec for codec in (*LADDER, Lossless(Bf16()), Lossless(Plain()))}


def codec_of(name: str) -> Codec:
    """Raises UsageError for a name that this version does not know."""
    if name not in CODECS:
        raise UsageError(
            f"codec {str(name)[:40]!r} is unknown here; use one of {', '.join(CODECS)}, or upgrade meshcee"
        )
    return CODECS[name]


def accepted(name: str) -> tuple[Codec, ...]:
    """This codec and the ones that a tensor may climb to, in that order; the last is `none`."""
    codec = codec_of(name)
    if isinstance(codec, Lossless):
        return (codec, *accepted(codec.inner.name))
    return LADDER[LADDER.index(codec) :]
