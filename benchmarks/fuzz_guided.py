"""Bytes of others, changed where a change reached new code: coverage guides benchmarks/fuzz.py.

`python -m benchmarks.fuzz_guided [--minutes 10] [--only frames] [--corpus DIR]` needs `pip install meshcee[fuzz]`. libFuzzer
keeps an input that reaches new code, and changes it further; `--corpus` keeps these from one run to the next. At the end a JSON
line says how many inputs were read and refused, how many were kept, and what went wrong. Exit code 1 when anything did.
`--again FILE` reads the input of a file once more.

The idea: libFuzzer's bytes are the draws. Its first byte chooses the target, the others answer whoever draws a change
(tests/rig/mutations.py), so each change keeps the form of a message. Bytes of others stand in place of a value too, as they are.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

if TYPE_CHECKING:
    from tests.rig.targets import Target

OURS = ["meshcee", "dht", "peers"]
MOST_BYTES = 4096  # of an input
RAW = 0.15  # of inputs of bytes are libFuzzer's own
MOST_TOLD = 20
SEEDS, SEED_BYTES = 4, 256  # of a target, to begin with
CUT_SHORT_S = 60  # an input that takes so long ends the run, and is kept


class Fed(random.Random):
    """Draws what bytes say; once they are used up, what follows from them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._rest = memoryview(data)

    def getrandbits(self, k: int) -> int:
        count = (k + 7) // 8
        if len(self._rest) < count:
            return super().getrandbits(k)
        return int.from_bytes(self.taken(count), "little") >> (count * 8 - k)

    def random(self) -> float:
        """To within 2**-16, which is fine enough for who draws."""
        return self.getrandbits(16) / (1 << 16)

    def taken(self, count: int | None = None) -> bytes:
        taken, self._rest = self._rest[:count], self._rest[len(self._rest) if count is None else count :]
        return bytes(taken)


def value_of(target: Target, draw: Fed) -> Any:
    from tests.rig.targets import changed

    if draw.random() < RAW and isinstance(target.valid()[0], bytes):
        return draw.taken()
    return changed(target, draw)


class Tally:
    """What became of inputs. One that goes wrong is kept as a file, and the run goes on."""

    def __init__(self, targets: list[Target], folder: Path) -> None:
        self.inputs: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: dict[str, str] = {}
        self._targets = targets
        self._folder = folder
        self._began_s = time.monotonic()

    def one(self, data: bytes) -> None:
        from tests.rig.targets import attempt

        if not data:
            return
        target, draw = self._targets[data[0] % len(self._targets)], Fed(data[1:])
        if draw.random() >= target.share:  # reading takes long
            return
        refused, wrong = attempt(target, value_of(target, draw))
        self.inputs[target.name] += 1
        self.refused[target.name] += refused
        if wrong and len(self.wrong) < MOST_TOLD and (said := f"{target.name}: {wrong}") not in self.wrong:
            kept = self._folder / f"wrong-{len(self.wrong)}"
            kept.write_bytes(data)
            self.wrong[said] = str(kept)

    def tell(self) -> None:
        from benchmarks.measure import machine

        inputs, took_s = sum(self.inputs.values()), time.monotonic() - self._began_s
        reached = {
            "targets": len(self.inputs),
            "inputs": inputs,
            "per_s": round(inputs / max(took_s, 1e-9)),
            "refused": sum(self.refused.values()),
            "corpus": sum(1 for _ in self._folder.iterdir()) - len(self.wrong),
            "fewest": min(((count, name) for name, count in self.inputs.items()), default=None),
            "wrong": self.wrong,
            "machine": machine(),
        }
        print(json.dumps(reached), flush=True)


def targets_of(words: list[str]) -> list[Target]:
    from tests.rig.targets import TARGETS

    return [target for target in TARGETS if any(word in target.name for word in words)]


def repeated(words: list[str], file: Path) -> bool:
    """Whether something is wrong with the input in this file."""
    with tempfile.TemporaryDirectory(prefix="meshcee-fuzz-") as folder:
        tally = Tally(targets_of(words), Path(folder))
        tally.one(file.read_bytes())
    print(*tally.wrong or ["nothing is wrong with it"], sep="\n")
    return bool(tally.wrong)


def guided(words: list[str], minutes: float, folder: Path) -> NoReturn:
    import atheris

    with atheris.instrument_imports(include=OURS):
        targets = targets_of(words)
    tally = Tally(targets, folder)
    for k, target in enumerate(targets):
        target.valid()  # some take seconds to be made, once
        for seed in range(SEEDS):
            (folder / f"seed-{k}-{seed}").write_bytes(bytes([k]) + random.Random(seed).randbytes(SEED_BYTES))
    end_s = time.monotonic() + 60 * minutes

    def one(data: bytes) -> None:
        if time.monotonic() > end_s:
            tally.tell()
            os._exit(bool(tally.wrong))  # libFuzzer knows no other end that is no crash
        tally.one(data)

    options = [f"-max_len={MOST_BYTES}", "-len_control=0", f"-timeout={CUT_SHORT_S}", "-rss_limit_mb=8192"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/crash-", str(folder)], one)
    atheris.Fuzz()
    raise AssertionError("libFuzzer came back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--corpus", type=Path, metavar="DIR")
    parser.add_argument("--again", type=Path, metavar="FILE")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if options.again:
        sys.exit(repeated(options.only, options.again))
    folder = options.corpus or Path(tempfile.mkdtemp(prefix="meshcee-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    guided(options.only, options.minutes, folder)


if __name__ == "__main__":
    main()
