"""``hashnet items add`` and ``hashnet items remove`` change a served index."""

from __future__ import annotations

import argparse
import os

from hashnet.cli.query import read_queries
from hashnet.client import Client
from hashnet.errors import DataError

EXAMPLES = """
examples:
  hashnet items add new.jpg --id 900 --label cat --label grey --url http://127.0.0.1:8000
  hashnet items add a.jpg b.jpg --id 901 --id 902 --upsert --url http://127.0.0.1:8000
  hashnet items remove --id 900 --id 901 --url http://127.0.0.1:8000

The server must have been started with HASHNET_WRITE_TOKEN; the token is taken from the same variable."""


def configure(parser: argparse.ArgumentParser, words: list[str]) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("add", "remove"), help="what to do")
    parser.add_argument(
        "queries", metavar="PICTURE", nargs="*", help="picture files, or one .npy of features"
    )
    parser.add_argument("--url", required=True, help="the server, as hashnet serve prints it")
    parser.add_argument(
        "--id", dest="ids", type=int, action="append", required=True, metavar="ID", help="one per item"
    )
    parser.add_argument("--label", action="append", metavar="LABEL", help="a class of every item added")
    parser.add_argument(
        "--key", action="append", metavar="KEY", help="a text that names the item, one per item"
    )
    parser.add_argument("--upsert", action="store_true", help="replace items that have one of the ids")


def run(arguments: argparse.Namespace) -> int:
    """Adds or removes items; prints how many, and the version of the index that has the change."""
    with Client(arguments.url, token=os.environ.get("HASHNET_WRITE_TOKEN"), retry_s=10) as client:
        if arguments.action == "remove":
            if arguments.queries or arguments.label or arguments.key or arguments.upsert:
                raise DataError("hashnet items remove takes --id only")
            version = client.remove(arguments.ids)
            print(f"removed {len(arguments.ids)} items: index version {version}")
            return 0
        if not arguments.queries:
            raise DataError("give the pictures to add, or a .npy file of features, and one --id for each")
        queries = read_queries(arguments.queries)
        labels = None if arguments.label is None else [arguments.label] * len(queries)
        columns = {"uri": list(queries)} if isinstance(queries, list) else {}
        if arguments.key is not None:
            if len(arguments.key) != len(queries):
                raise DataError(
                    f"{len(queries)} items came with {len(arguments.key)} --key; give one for each"
                )
            columns["key"] = arguments.key
        version = client.add(queries, arguments.ids, labels, columns=columns or None, upsert=arguments.upsert)
        print(f"added {len(queries)} items: index version {version}")
    return 0
