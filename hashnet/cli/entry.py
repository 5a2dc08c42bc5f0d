"""``hashnet``: what needs no cluster. A user's mistake is one sentence and exit code 2, no stack trace.

A further command is a module in ``hashnet/cli`` and a line in ``COMMANDS``; the short ones, serve and items,
are here. Only what the requested command needs is imported, so that ``hashnet query`` starts without torch.
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
from hashnet.errors import ConfigError, DataError, HashnetError, NotInstalled
from hashnet.run import Run

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
                configure = (
                    COMMANDS_HERE.get(name) or importlib.import_module(f"hashnet.cli.{name}").configure
                )
                configure(command, words[1:])
            except ModuleNotFoundError as error:
                return _not_installed(name, error)
    arguments, settings = parser.parse_known_args(words)
    takes_settings = hasattr(arguments, "settings")
    unknown = [word for word in settings if word.startswith("--")] if takes_settings else settings
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest_option(parser, unknown)}")
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


def _nearest_option(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """``; did you mean --label?`` for the first word like an option of the parser or its subcommands."""
    known = _options(parser)
    for word in words:
        if near := difflib.get_close_matches(word.partition("=")[0], known, n=1):
            return f"; did you mean {near[0]}?"
    return ""


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser and of its subcommands."""
    found: list[str] = []
    for action in parser._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            found += [option for sub in action.choices.values() for option in _options(sub)]
    return found


def _not_installed(command: str, error: ModuleNotFoundError) -> int:
    """The base install is what a client needs; the rest comes with an extra."""
    if not error.name or error.name.startswith("hashnet"):
        raise error
    print(NotInstalled(f"hashnet {command}", error.name), file=sys.stderr)
    return NotInstalled.exit_code


SERVE_EXAMPLES = """
examples:
  hashnet serve runs/demo
  hashnet serve runs/demo --workers 4 --port 8001 max_k=5000 timeout_s=60

Any address but loopback needs a token: HASHNET_TOKEN for reading. HASHNET_WRITE_TOKEN turns writing on.
`jobs/serve.py` serves on a Ray cluster.

settings (KEY=VALUE):
"""


def _configure_serve(parser: argparse.ArgumentParser, words: list[str]) -> None:
    from hashnet.io import config as configs
    from hashnet.server import ServeConfig

    parser.epilog = SERVE_EXAMPLES + configs.describe(ServeConfig)
    parser.add_argument(
        "run_folder", metavar="RUN", help="run folder with index/ (codes/, model/, manifest.parquet)"
    )
    parser.set_defaults(run=_serve, settings=[])  # it takes settings
    parser.usage = "hashnet serve RUN [--host HOST] [--port PORT] [--workers N] [KEY=VALUE …]"
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", help="port to listen on (default 8000)")
    parser.add_argument("--workers", metavar="N", help="processes that respond (replicas=N; default 1)")


def _serve(arguments: argparse.Namespace) -> int:
    """Serves a run's index over HTTP on this machine, without Ray, until Ctrl-C."""
    from hashnet.io import config as configs
    from hashnet.server import ServeConfig, serve_standalone

    words = [f"run={arguments.run_folder}", *arguments.settings]
    flags = {"host": arguments.host, "port": arguments.port, "replicas": arguments.workers}
    words += [f"{name}={value}" for name, value in flags.items() if value is not None]
    config = configs.load(ServeConfig, overrides=words)
    if config.index is None:
        Run(config.run).check_folder()
    config = configs.with_absolute_paths(config)
    if config.slices is not None:
        raise ConfigError("slices= spreads an index over a Ray cluster: use jobs/serve.py")
    return serve_standalone(config)


ITEMS_EXAMPLES = """
examples:
  hashnet items add new.jpg --id 900 --label cat --label grey --url http://127.0.0.1:8000
  hashnet items add a.jpg b.jpg --id 901 --id 902 --upsert --url http://127.0.0.1:8000
  hashnet items add new.jpg --key new.jpg --upsert --url http://127.0.0.1:8000   by key: ids are found or made
  hashnet items remove --id 900 --id 901 --url http://127.0.0.1:8000             or --key

The server must have been started with HASHNET_WRITE_TOKEN; the token is taken from the same variable."""


def _configure_items(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.set_defaults(run=_items)
    parser.epilog = ITEMS_EXAMPLES
    parser.add_argument("action", choices=("add", "remove"), help="what to do")
    parser.add_argument(
        "queries", metavar="PICTURE", nargs="*", help="picture files, or one .npy of features or codes"
    )
    parser.add_argument("--url", required=True, help="the server, as hashnet serve prints it")
    parser.add_argument("--id", dest="ids", type=int, action="append", metavar="ID", help="one per item")
    parser.add_argument("--label", action="append", metavar="LABEL", help="a class of every item added")
    parser.add_argument(
        "--key", dest="keys", action="append", metavar="KEY", help="a text that names the item, one per item"
    )
    parser.add_argument(
        "--upsert", action="store_true", help="replace items that have one of the ids or, without ids, keys"
    )


def _items(arguments: argparse.Namespace) -> int:
    """Adds items to a served index or removes some; prints how many, and the version with the change."""
    from hashnet.cli.query import codes_or_features, read_queries
    from hashnet.client import Client

    with Client(arguments.url, token=os.environ.get("HASHNET_WRITE_TOKEN"), retry_s=10) as client:
        if arguments.action == "remove":
            if arguments.queries or arguments.label or arguments.upsert:
                raise DataError("hashnet items remove takes --id or --key only")
            if bool(arguments.ids) == bool(arguments.keys):
                raise DataError("give --id or --key, one of them, for each item to remove")
            version = client.remove(arguments.ids, keys=arguments.keys)
            print(f"removed {len(arguments.ids or arguments.keys)} items: index version {version}")
            return 0
        if not arguments.queries or not (arguments.ids or arguments.keys):
            raise DataError(
                "give the pictures to add, or a .npy file of features or codes, and one --id or --key "
                "for each"
            )
        queries = read_queries(arguments.queries)
        if not isinstance(queries, list):
            info = client.info()
            queries = codes_or_features(queries, info["n_bits"], "features" in info["accepts"])
        labels = None if arguments.label is None else [arguments.label] * len(queries)
        columns = {"uri": list(queries)} if isinstance(queries, list) else None
        if arguments.keys is not None and len(arguments.keys) != len(queries):
            raise DataError(f"{len(queries)} items came with {len(arguments.keys)} --key; give one for each")
        version = client.add(
            queries, arguments.ids, labels, keys=arguments.keys, columns=columns, upsert=arguments.upsert
        )
        print(f"added {len(queries)} items: index version {version}")
    return 0


COMMANDS_HERE = {"serve": _configure_serve, "items": _configure_items}
