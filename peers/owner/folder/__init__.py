"""The folder of a run that this machine keeps: its diary, its checkpoints, and its journal on other machines.

A wing: a run trains without one, and then ends with its process (`peers.owner.numbers.Unwritten`).
"""

from peers.owner.folder.diary import Diary
from peers.owner.folder.folder import Folder

__all__ = ["Diary", "Folder"]
