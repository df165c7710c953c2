"""Whether a run that is resumed has the rates that it began with: what a checkpoint keeps of a schedule.

The idea: where the words of a schedule say all, nothing is kept. Where it has functions of the user's, some rates are kept as they
are, and digests of all rates before some steps.
"""

from __future__ import annotations

import itertools
import time
from array import array
from weakref import WeakKeyDictionary

import xxhash

from meshcee.optim.hyper import HyperSchedule
from meshcee.optim.optimizer import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.user_code import calling

__all__ = ["rate_digests", "some_rates"]

MOST_DRIVEN = 256  # steps that are walked through for `some_rates`, which takes some 10 ms
DIGEST_S = 1.0

_digested: WeakKeyDictionary[Schedule, tuple[tuple[Optimizer, set[int]], dict[int, str]]] = WeakKeyDictionary()


def some_rates(optimizer: Optimizer, schedule: Schedule | None, steps: int) -> list[str]:
    """What the functions of a schedule give in some of its steps; nothing for one without any: its words say all. These are the
    first steps, and then each is twice as late as the one before. So a job with more steps has the same ones first.
    """
    if schedule is None or next(schedule.functions, None) is None:
        return []
    driven = HyperSchedule(optimizer, schedule)
    end = steps if schedule.name == "LambdaLR" else min(steps, MOST_DRIVEN + 1)
    return [repr(driven.at(step)) for step in (1, 2, 3, *(1 << k for k in range(2, end.bit_length()))) if step < end]


def rate_digests(optimizer: Optimizer, schedule: Schedule | None, steps: int, *more: int) -> dict[int, str]:
    """Of all rates before some steps, the last of `steps` and `more` among them; nothing for a schedule whose words say all.

    The others are the first steps, and then each is an eighth later. Of very many it has what `DIGEST_S` allows. All epochs of a
    run have the same.
    """
    if schedule is None:
        return {}
    functions = list(schedule.functions) if schedule.factor is None else [schedule.factor]
    if not functions:
        return {}
    asked = optimizer, {steps, *more, *itertools.accumulate(range(200), lambda end, _: end + 1 + end // 8)}
    if (known := _digested.get(schedule)) is not None and known[0] == asked:
        return known[1]
    says_all = schedule.name == "LambdaLR" or schedule.factor is not None  # its functions
    driven = None if says_all else HyperSchedule(optimizer, schedule)
    found, digest, until_s = dict[int, str](), xxhash.xxh64(), time.monotonic() + DIGEST_S
    with calling("the schedule"):
        for step in range(steps):
            digest.update(repr(driven.at(step)).encode() if driven else array("d", [each(step) for each in functions]))
            if step + 1 in asked[1]:
                found[step + 1] = digest.hexdigest()
                if time.monotonic() > until_s:
                    break
    _digested[schedule] = asked, found
    return found
