"""The ``functional-ckpt`` command: look into a checkpoint, and check it, without torch.

``facts`` reads a checkpoint into plain dicts, which ``--json`` prints as they are; ``tables`` turns them into text.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from functional_ckpt import __version__
from functional_ckpt.errors import CheckpointError, CheckpointErrors, NotACheckpointError

__all__ = ["main"]

_EPILOG = "exit status: 0 fine, 1 a problem was found, 2 there is no checkpoint at PATH (or the command line is wrong)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 for a problem, 2 for a path without a checkpoint.

    Examples
    --------
    >>> import functional_ckpt, numpy as np
    >>> _ = functional_ckpt.save({"w": np.ones((2, 3), "f4"), "step": 7}, "memory://cli-example")
    >>> main(["ls", "memory://cli-example"])
    key  dtype    shape   chunks  bytes  ownership
    w    float32  [2, 3]       1   24 B  exclusive
    <BLANKLINE>
    value  holds
    step   7
    <BLANKLINE>
    1 array (24 B in 1 chunk), 1 value
    0
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except NotACheckpointError as error:
        return _fail(error, 2)
    except CheckpointError as error:
        return _fail(error, 1)
    except RecursionError as error:  # a value nested deeper than can be printed
        return _fail(error, 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _ls(arguments: argparse.Namespace) -> int:
    from functional_ckpt.cli import facts, tables

    found = facts.listing(_open(arguments.path), arguments.prefix)
    return _print_json(found) if arguments.json else tables.print_listing(found)


def _show(arguments: argparse.Namespace) -> int:
    from functional_ckpt.cli import facts, tables

    checkpoint = _open(arguments.path)
    if arguments.key is None:
        found = facts.header(checkpoint)
        return _print_json(found) if arguments.json else tables.print_header(found)
    found = facts.leaf(checkpoint, arguments.key)
    return _print_json(found) if arguments.json else tables.print_leaf(found)


def _verify(arguments: argparse.Namespace) -> int:
    from functional_ckpt.cli import facts, tables

    checkpoint = _open(arguments.path)
    with tables.progress(f"verifying {arguments.path}", checkpoint.manifest.nbytes) as on_bytes:
        found = facts.verification(checkpoint, on_bytes)
    _print_json(found) if arguments.json else tables.print_verification(found)
    return 0 if found["ok"] else 1


def _open(path: str) -> Any:
    from functional_ckpt.run.checkpoint import open_checkpoint

    return open_checkpoint(path)


def _print_json(found: object) -> int:
    print(json.dumps(found, indent=2, allow_nan=False))
    return 0


def _fail(error: Exception, status: int) -> int:
    from functional_ckpt.cli.tables import clean

    problems = error.exceptions if isinstance(error, CheckpointErrors) else (error,)
    for problem in problems:
        print(f"functional-ckpt: {clean(str(problem))}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "functional-ckpt", description="Look into a checkpoint, and check it.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    ls = _command(commands, "ls", _ls, "list the arrays and values of a checkpoint")
    ls.add_argument("--prefix", default="", help="list only the keys that start with this text")
    show = _command(commands, "show", _show, "describe a checkpoint, or the array or value under KEY")
    show.add_argument("key", metavar="KEY", nargs="?", help="for an array this reads it, to sum up what it holds")
    _command(commands, "verify", _verify, "read every chunk and compare it with the digest taken when it was saved")
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text.capitalize() + ".", epilog=_EPILOG
    )
    parser.add_argument("path", metavar="PATH", help="directory or URL of a checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text for people")
    parser.set_defaults(run=run)
    return parser
