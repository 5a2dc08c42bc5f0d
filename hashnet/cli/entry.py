"""``hashnet``: what needs no cluster. A user's mistake is one sentence and exit code 2, no stack trace.

A further command is a module in ``hashnet/cli`` and a line in ``COMMANDS``. Only the module of
the requested command is imported, so that ``hashnet query`` starts without torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from hashnet import __version__
from hashnet.errors import HashnetError, NotInstalled

COMMANDS = {  # name → what it does
    "dataset": "make a manifest: the list of a data set's pictures or features, with labels and splits",
    "inspect": "say what a manifest, model, code store, index, report or run is, and whether it is sound",
    "serve": "serve a run's index over HTTP on this machine, with a search page",
    "items": "add items to a served index, or remove them",
    "query": "search by a picture, features or an indexed item: a server, or a run's folder",
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the nearest command for one that it does not know."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        near = difflib.get_close_matches(str(value), choices, n=1)
        if near and str(value) not in choices:
            raise argparse.ArgumentError(action, f"there is no {value!r}; did you mean {near[0]!r}?")
        super()._check_value(action, value)


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for a mistake in the input, 1 for a failure."""
    words = list(sys.argv[1:] if words is None else words)
    parser = Parser(
        prog="hashnet",
        description="Learned binary codes for images and embeddings. Training, encoding, indexing, "
        "evaluation and serving on a cluster are jobs: see python jobs/train.py --help and the other jobs.",
    )
    parser.add_argument("--version", action="version", version=f"hashnet {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, meaning in COMMANDS.items():
        command = commands.add_parser(
            name, help=meaning, description=meaning, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if words and words[0] == name:
            try:
                module = importlib.import_module(f"hashnet.cli.{name}")
            except ModuleNotFoundError as error:
                return _not_installed(name, error)
            module.configure(command, words[1:])
            command.set_defaults(run=module.run)
    arguments, settings = parser.parse_known_args(words)
    if settings and not hasattr(arguments, "settings"):
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings  # KEY=VALUE words, between and after the options
    try:
        return arguments.run(arguments)
    except HashnetError as error:
        print(f"hashnet {arguments.command}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        return _not_installed(arguments.command, error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `hashnet … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _not_installed(command: str, error: ModuleNotFoundError) -> int:
    """The base install is what a client needs; the rest comes with an extra."""
    if not error.name or error.name.startswith("hashnet"):
        raise error
    print(NotInstalled(f"hashnet {command}", error.name), file=sys.stderr)
    return NotInstalled.exit_code
