"""A short code, and how often and how long it may be tried.

The idea: eight digits are few. What makes them safe is that nobody has more than three wrong guesses at them, that they end after
ten minutes, and that one machine uses them up. All of it is counted here, by a clock that is passed in.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from meshcee.errors import UsageError

__all__ = ["CODE_S", "MOST_WRONG", "Code", "CodeWindow"]

DIGITS = 8
CODE_S = 600.0
MOST_WRONG = 3


@dataclass(frozen=True)
class Code:
    """Eight digits; `str` is how people read them to one another."""

    digits: str

    @classmethod
    def fresh(cls) -> Code:
        return cls(f"{secrets.randbelow(10**DIGITS):0{DIGITS}}")

    @classmethod
    def parse(cls, text: str) -> Code:
        """As somebody types it, with or without spaces and dashes."""
        digits = re.sub(r"[\s-]", "", text)
        if not re.fullmatch(rf"[0-9]{{{DIGITS}}}", digits):
            raise UsageError(f"a code has {DIGITS} digits, as in 4821-7733: type it as the first machine shows it")
        return cls(digits)

    @property
    def secret(self) -> bytes:
        """What both sides must know."""
        return b"meshcee code " + self.digits.encode()

    def __str__(self) -> str:
        return f"{self.digits[: DIGITS // 2]}-{self.digits[DIGITS // 2 :]}"

    def __repr__(self) -> str:
        return "Code(...)"  # no log and no traceback tells it


class CodeWindow:
    """Whether a code may still be tried. `why_not` is empty while it may."""

    def __init__(self, clock: Callable[[], float], life_s: float = CODE_S) -> None:
        self._clock = clock
        self._ends_s = clock() + life_s
        self.wrong = 0
        self.is_used = False

    @property
    def left_s(self) -> float:
        """Until it ends by itself."""
        return max(0.0, self._ends_s - self._clock())

    @property
    def guesses_left(self) -> int:
        return MOST_WRONG - self.wrong

    @property
    def why_not(self) -> str:
        if self.is_used:
            return "the code has let a machine in already"
        if self.wrong >= MOST_WRONG:
            return f"the code has ended after {MOST_WRONG} wrong guesses"
        return "" if self.left_s else f"the code has ended, {CODE_S / 60:.0f} minutes after it was shown"

    def guessed_wrong(self) -> None:
        self.wrong += 1

    def use(self) -> None:
        self.is_used = True
