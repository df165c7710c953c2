"""Fewer bytes for the same bits: the exponents of a tensor's numbers, packed.

The idea: mantissas are as good as random, but most numbers of a tensor are of a few sizes, so their exponents need 2.5 to 3 bits
instead of 8. They are gathered and packed by Huffman's code alone (zlib's; looking for repetitions finds none): a fifth of
fp32 and a third of bf16 is saved. Behind another codec it packs what that one has rounded.

Layout of a payload: each number is turned by one bit to the left, so that its sign is the last bit and its highest byte holds
exponent only. First come all lowest bytes, then all second ones and so on, and last the highest, packed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from meshcee.codec.base import Codec
from meshcee.errors import ProtocolError

__all__ = ["Lossless"]

RAW = -15  # zlib's window, without header or checksum: streams have their own


class Lossless:
    """What another codec makes, whose numbers are floats; its errors are that one's. Packed on the host, where zlib is."""

    varies = True

    def __init__(self, inner: Codec) -> None:
        self.name = "lossless" if inner.name == "none" else f"{inner.name}-lossless"
        self.worst, self.budget = inner.worst, inner.budget
        self.inner = inner

    def wire_bytes(self, dtype: torch.dtype, count: int) -> int:
        return max(0, self.inner.wire_bytes(dtype, count) - 1)

    def encode(self, tensor: torch.Tensor, seed: int | None = None) -> torch.Tensor | None:
        """None, too, when it would save nothing, and for fp16 behind bf16, which would round it and make large numbers infinite."""
        if tensor.dtype == torch.float16 and self.inner.worst > 0:
            return None
        plain, count = self.inner.encode(tensor, seed), tensor.numel()
        if plain is None or not count:
            return None
        width = self._width(tensor.dtype)
        words = plain.cpu().numpy().view(f"<u{width}")
        turned = words << 1 | words >> (8 * width - 1)
        planes = turned.view(np.uint8).reshape(count, width).T
        packer = zlib.compressobj(1, zlib.DEFLATED, RAW, zlib.DEF_MEM_LEVEL, zlib.Z_HUFFMAN_ONLY)
        packed = packer.compress(planes[-1].tobytes()) + packer.flush()
        if len(packed) >= count:
            return None
        payload = np.empty((width - 1) * count + len(packed), np.uint8)
        payload[: (width - 1) * count].reshape(width - 1, count)[:] = planes[:-1]
        payload[(width - 1) * count :] = np.frombuffer(packed, np.uint8)
        return torch.from_numpy(payload)

    def decode(self, payload: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """ProtocolError when what was packed is not as many numbers; never more memory than they take."""
        count, width = math.prod(shape), self._width(dtype)
        got, cut = payload.cpu().numpy(), (width - 1) * count
        try:
            highest = zlib.decompressobj(RAW).decompress(got[cut:].data, count)
        except zlib.error as error:
            raise ProtocolError(f"packed numbers that do not unpack: {error}") from None
        if len(highest) != count:
            raise ProtocolError(f"{len(highest)} packed numbers instead of {count}")
        planes = np.empty((count, width), np.uint8)
        planes[:, :-1] = got[:cut].reshape(width - 1, count).T
        planes[:, -1] = np.frombuffer(highest, np.uint8)
        turned = planes.reshape(-1).view(f"<u{width}")
        words = turned >> 1 | turned << (8 * width - 1)
        plain = torch.from_numpy(words.view(np.uint8)).to(payload.device)
        return self.inner.decode(plain, dtype, shape)

    def _width(self, dtype: torch.dtype) -> int:
        return self.inner.wire_bytes(dtype, 1)
