"""The command line: commands, their arguments and help."""

import argparse
from collections.abc import Callable
from typing import Any

from functional_ckpt import __version__
from functional_ckpt.cli import commands
from functional_ckpt.cli.completion import SCRIPTS

__all__ = ["make_parser"]

_EPILOG = """\
exit status: 0 success, 1 a problem was found (damage, no such key or prefix), 2 there is no checkpoint (or the
command line is wrong), 130 interrupted. NO_COLOR=1 turns colours off; a pipe gets neither colours nor rules."""

_COMPLETION = """\
Print the script by which a shell completes commands, options and keys.
In ~/.bashrc: eval "$(functional-ckpt completion bash)"; in ~/.zshrc, after compinit:
eval "$(functional-ckpt completion zsh)"; for fish:
functional-ckpt completion fish > ~/.config/fish/completions/functional-ckpt.fish"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; `run` of what it returns is the command."""
    parser = argparse.ArgumentParser(
        "functional-ckpt", description="Look into a checkpoint, check it, and remove it.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    found = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    ls = _command(found, "ls", commands.ls, "list the arrays and values of a checkpoint, or a directory of checkpoints")
    _add_prefix(ls)
    tree = _command(found, "tree", commands.tree, "show keys as a tree, with parameters and bytes of each branch")
    _add_prefix(tree)
    tree.add_argument("--depth", type=_whole, metavar="N", help="levels to show (default: as many as fit in 100 rows)")
    tree.add_argument("--all", action="store_true", help="show every key, and layers that are alike one by one")
    show = _command(found, "show", commands.show, "describe a checkpoint, or the array or value under KEY")
    show.add_argument("key", metavar="KEY", nargs="?", help="for an array this reads it, to sum up what it holds")
    show.add_argument("--slice", type=_index, metavar="INDEX", help="print these elements, such as '0, :10, -1'")
    chart = _command(found, "map", commands.chart, "draw how an array was cut into chunks, and which rank wrote which")
    chart.add_argument("key", metavar="KEY", help="key of an array")
    chart.add_argument("--svg", metavar="FILE", nargs="?", const="-", help="draw a figure, to FILE or standard output")
    _command(found, "verify", commands.verify, "read every chunk and compare it with its digest")
    rm = _command(
        found, "rm", commands.rm, "remove checkpoints that are not pinned and hold no files of others", "paths"
    )
    rm.add_argument("--yes", action="store_true", help="do not ask; required if standard input is not a terminal")
    rm.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    _command(found, "sweep", commands.sweep, "remove the leftovers of dead saves in a directory of checkpoints")
    completion = found.add_parser(
        "completion",
        help="print a script for a shell, which then completes commands, options and keys",
        description=_COMPLETION,
        epilog=_EPILOG,
    )
    completion.add_argument("shell", metavar="SHELL", choices=sorted(SCRIPTS), help="bash, zsh or fish")
    completion.set_defaults(run=commands.completion)
    return parser


def _add_prefix(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prefix",
        action="append",
        default=[],
        metavar="KEY",
        help="only KEY and the keys below it, as in LoadPolicy(keys=...); can be repeated",
    )


def _command(found: Any, name: str, run: Callable[..., int], text: str, path: str = "path") -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = found.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=_EPILOG
    )
    several = {"nargs": "+"} if path == "paths" else {}
    parser.add_argument(path, metavar="PATH", help="directory or URL of a checkpoint", **several)  # type: ignore[arg-type]
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text for people")
    parser.set_defaults(run=run)
    return parser


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def _index(text: str) -> tuple[Any, ...]:
    from functional_ckpt.cli.content import parse_index

    return parse_index(text)
