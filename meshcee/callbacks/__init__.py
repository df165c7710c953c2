"""What hears of a run while it trains, and may steer it: stop, evaluate, save, change the learning rate.

`Callback` is what a user writes, `Control` what a callback asks of a run and what the owner reads of it. No clocks, no threads.
Those that everybody needs are in `rules`, which is loaded when one of them is asked for.
"""

from meshcee.callbacks.callback import Callback
from meshcee.callbacks.control import Control
from meshcee.callbacks.listeners import Listeners, called

__all__ = ["Callback", "Control", "Listeners", "called"]
