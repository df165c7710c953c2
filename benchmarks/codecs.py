"""How fast codecs are on one core, how many bytes they save, how far off they are; and what was considered beside them.

The idea: the same activations (64 outlier channels of 30 times the size among 768, as transformers have) through every
codec, as fp32 and as bf16. A codec pays on links slower than saved bytes / (seconds in and out): the last column.

`python benchmarks/codecs.py [--turns N] [--out FILE]`, about half a minute. fp8 (a cast to e4m3 under one scale a tensor) and
blosc2 (zstd-1 after a byte shuffle) are not codecs of meshcee; they are here to be compared with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import torch
from measure import machine, row

from meshcee.codec import CODECS
from meshcee.codec.coder import relative_error
from peers.device.compute import Compute

__all__ = ["measure"]

SIZES_MIB = (1, 16)
CHANNELS, OUTLIERS, HOW_LARGE = 768, 64, 30.0
Code = tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.Tensor], torch.Tensor], Callable[[Any], int]]


def activations(size: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    rows = size // dtype.itemsize // CHANNELS
    tensor = torch.randn(rows, CHANNELS)
    tensor[:, torch.randperm(CHANNELS)[:OUTLIERS]] *= HOW_LARGE
    return tensor.to(dtype)


def candidates() -> dict[str, Code]:
    """Name -> encode, decode (payload, what it was), bytes of a payload."""
    found: dict[str, Code] = {}
    for codec in CODECS.values():
        for seed, label in ((None, codec.name), (1, f"{codec.name} by chance")):
            if seed is not None and codec.name not in ("int8", "int4"):
                continue
            found[label] = (
                lambda t, codec=codec, seed=seed: codec.encode(t, seed),
                lambda p, t, codec=codec: codec.decode(p, t.dtype, t.shape),
                lambda p: p.numel(),
            )

    def fp8(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = t.float().abs().amax() / 448
        return (t / scale).to(torch.float8_e4m3fn), scale

    def pressed(t: torch.Tensor) -> bytes:
        flat = t.contiguous().view(torch.uint8).numpy()
        packed = blosc2.compress2(
            flat,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            typesize=t.dtype.itemsize,
            nthreads=1,
            filters=[blosc2.Filter.SHUFFLE],
        )
        return bytes(packed)

    def unpressed(p: bytes, t: torch.Tensor) -> torch.Tensor:
        out = np.empty(t.nbytes, dtype=np.uint8)
        blosc2.decompress2(p, dst=out, nthreads=1)
        return torch.from_numpy(out).view(t.dtype).view(t.shape)

    found["(fp8)"] = (fp8, lambda p, t: (p[0].to(t.dtype) * p[1]).to(t.dtype), lambda p: p[0].numel() + 4)
    found["(blosc2)"] = (pressed, unpressed, len)
    return found


def seconds(call: Callable[[], Any], turns: int) -> float:
    """The best of some turns: what else the machine does only ever adds."""
    best = float("inf")
    for _ in range(turns):
        start_s = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start_s)
    return best


def measure(turns: int) -> list[dict[str, Any]]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for mib in SIZES_MIB:
            tensor = activations(mib << 20, dtype)
            for name, (encode, decode, size) in candidates().items():
                if name == "bf16" and dtype == torch.bfloat16:
                    continue
                payload = encode(tensor)
                in_s = seconds(lambda: encode(tensor), turns)  # noqa: B023  (called at once)
                out_s = seconds(lambda: decode(payload, tensor), turns)  # noqa: B023
                saved = tensor.nbytes - size(payload)
                rows.append(
                    {
                        "codec": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "mib": mib,
                        "in_bytes_per_s": tensor.nbytes / in_s,
                        "out_bytes_per_s": tensor.nbytes / out_s,
                        "seconds_per_element": (in_s + out_s) / tensor.numel(),
                        "ratio": tensor.nbytes / size(payload),
                        "error": relative_error(tensor, decode(payload, tensor)),
                        "pays_below_bits_per_s": max(0.0, 8 * saved / (in_s + out_s)),
                    }
                )
    return rows


async def hop_s(turns: int) -> float:
    """To the thread beside the device's and back: what each payload costs however small it is, once on either side."""
    async with Compute() as compute:
        found = []
        for _ in range(100 * turns):
            start_s = time.perf_counter()
            await compute.run_aside(int)
            found.append(time.perf_counter() - start_s)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"machine": machine(), "hop_s": asyncio.run(hop_s(options.turns)), "rows": measure(options.turns)}
    text = json.dumps(found, indent=2)
    if options.out is not None:
        options.out.write_text(text)
    print(text)
    print(f"a hop to the thread beside: {found['hop_s'] * 1e3:.3f} ms")
    print(row("type", "MiB", "codec", "ratio", "relative error", "in, MB/s", "out, MB/s", "pays below, Gbit/s"))
    print(row(*["---"] * 8))
    for r in found["rows"]:
        speeds = f"{r['in_bytes_per_s'] / 1e6:.0f}", f"{r['out_bytes_per_s'] / 1e6:.0f}"
        pays = f"{r['pays_below_bits_per_s'] / 1e9:.1f}" if r["ratio"] > 1 else "-"
        print(row(r["dtype"], r["mib"], r["codec"], f"{r['ratio']:.2f}", f"{r['error']:.4f}", *speeds, pays))


if __name__ == "__main__":
    main()
