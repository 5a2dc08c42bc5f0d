"""The command line: ``hashnet dataset | inspect | query``."""

from hashnet.cli.entry import main

__all__ = ["main"]
