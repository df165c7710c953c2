"""The codecs by name, from the fewest bytes to the exact ones.

The idea: what is not fit for a rung climbs, so a peer that was told of a codec must accept that one and those above it. What
cannot be packed travels by the rung that it was packed behind. `blocks`, the two rungs that round most, is a wing.
"""

from __future__ import annotations

import functools

from meshcee.codec.base import Codec, Plain
from meshcee.codec.cast import Bf16
from meshcee.codec.lossless import Lossless
from meshcee.errors import UsageError

__all__ = ["CODECS", "LADDER", "accepted", "codec_of"]

LADDER = ("int4", "int8", "bf16", "none")
CODECS = (*LADDER, "bf16-lossless", "lossless")


def codec_of(name: str) -> Codec:
    """The same one each time. Raises UsageError for a name that this version does not know."""
    if name not in CODECS:
        raise UsageError(
            f"codec {str(name)[:40]!r} is unknown here; use one of {', '.join(CODECS)}, or upgrade meshcee"
        )
    return _made(name)


@functools.cache
def _made(name: str) -> Codec:
    if name.endswith("lossless"):
        return Lossless(_made(name.removesuffix("lossless").removesuffix("-") or "none"))
    if name in ("bf16", "none"):
        return Bf16() if name == "bf16" else Plain()
    from meshcee.codec.blocks import Int4, Int8

    return Int4() if name == "int4" else Int8()


def accepted(name: str) -> tuple[Codec, ...]:
    """This codec and the ones that a tensor may climb to, in that order; the last is `none`."""
    codec = codec_of(name)
    if isinstance(codec, Lossless):
        return (codec, *accepted(codec.inner.name))
    return tuple(map(codec_of, LADDER[LADDER.index(name) :]))
