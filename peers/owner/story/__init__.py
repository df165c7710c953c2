"""The story of a run for whoever looks at it later or from another process: what happened, and what stood behind its plans.

`Story` hears of a run as a callback does and writes beside its reports. Nothing of a run reads it. What a disk refuses is left out.
"""

from peers.owner.story.story import Story

__all__ = ["Story"]
