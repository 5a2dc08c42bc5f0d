"""The command line: ``hashnet dataset | inspect | serve | items | query``."""

from hashnet.cli.entry import main

__all__ = ["main"]
