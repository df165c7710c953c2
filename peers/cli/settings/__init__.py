"""What a user has set, and where: flags over the environment over one file over the defaults."""

from peers.cli.settings.file import config_file, defaults_of

__all__ = ["config_file", "defaults_of"]
