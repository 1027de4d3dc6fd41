"""The commands: each reads facts and prints them as JSON or text. Modules are imported when a command needs them."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from functional_ckpt.cli.screen import Screen, write
from functional_ckpt.errors import NotACheckpointError
from functional_ckpt.show.text import clean, size

__all__ = ["chart", "completion", "ls", "rm", "show", "sweep", "tree", "verify"]


def ls(arguments: argparse.Namespace) -> int:
    """List a checkpoint, or a directory of checkpoints."""
    from functional_ckpt.cli import facts, roots, tables

    try:
        checkpoint = _opened(arguments.path)
    except NotACheckpointError:
        inner = roots.checkpoints_in(arguments.path)
        if not inner:
            raise
        found = roots.root_listing(arguments.path, inner)
        return _print(arguments, found, lambda screen: roots.root_lines(screen, found))
    listed = facts.listing(checkpoint, arguments.prefix)
    return _print(arguments, listed, lambda screen: tables.listing(screen, listed))


def tree(arguments: argparse.Namespace) -> int:
    """Show the tree of keys."""
    from functional_ckpt.cli import facts, tables

    checkpoint = _opened(arguments.path)
    root = facts.tree(checkpoint, arguments.prefix)
    if arguments.json:
        return _print_json({"path": checkpoint.url, **facts.branches(root, arguments.depth)})
    write(tables.tree(Screen.current(), root, arguments.depth, arguments.all))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Describe a checkpoint, or what is under a key."""
    from functional_ckpt.cli import facts, tables

    checkpoint = _opened(arguments.path)
    if arguments.key is None:
        found = facts.header(checkpoint)
        return _print(arguments, found, lambda screen: tables.header(screen, found))
    leaf = facts.leaf(checkpoint, arguments.key, arguments.slice)
    return _print(arguments, leaf, lambda screen: tables.leaf(screen, leaf))


def chart(arguments: argparse.Namespace) -> int:
    """Draw how an array was cut, and who wrote what."""
    from functional_ckpt.cli import chart as charts

    found = charts.chart(_opened(arguments.path), arguments.key)
    if arguments.svg is None:
        return _print(arguments, found, lambda screen: charts.chart_lines(screen, found))
    figure = charts.chart_svg(found)
    if arguments.svg == "-":
        write(figure.splitlines())
    else:
        Path(arguments.svg).write_text(figure, "utf-8")
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Check every chunk."""
    from functional_ckpt.cli import facts, tables

    checkpoint = _opened(arguments.path)
    found = facts.verification(checkpoint)
    _print(arguments, found, lambda screen: tables.verification(screen, found))
    return 0 if found["ok"] else 1


def rm(arguments: argparse.Namespace) -> int:
    """Remove checkpoints, after a confirmation."""
    from functional_ckpt.cli import removal

    found = removal.removable(arguments.paths)
    if not (arguments.yes or arguments.dry_run):
        if not sys.stdin.isatty():
            print(
                "functional-ckpt: without a terminal to ask on, --yes is required",
                file=sys.stderr,
            )
            return 2
        if not removal.is_agreed(found):
            return 1
    if not arguments.dry_run:
        removal.removed(found)
    word = "would remove" if arguments.dry_run else "removed"
    lines = [f"{word} {clean(each['path'])}, {size(each['nbytes'])}" for each in found["checkpoints"]]
    return _print(arguments, {**found, "dry_run": arguments.dry_run}, lambda _: lines)


def sweep(arguments: argparse.Namespace) -> int:
    """Remove the leftovers of dead saves."""
    from functional_ckpt.cli import removal

    found = removal.swept(arguments.path)
    lines = [f"removed {clean(name)}" for name in found["removed"]] or ["nothing to remove"]
    for text in found["left"]:
        print(f"functional-ckpt: {clean(text)}", file=sys.stderr)
    return _print(arguments, found, lambda _: lines)


def completion(arguments: argparse.Namespace) -> int:
    """Print a shell's script."""
    from functional_ckpt.cli.completion import SCRIPTS

    write(SCRIPTS[arguments.shell].splitlines())
    return 0


def _opened(path: str) -> Any:
    from functional_ckpt.run.checkpoint import open_checkpoint

    return open_checkpoint(path)


def _print(arguments: argparse.Namespace, found: object, lines: Any) -> int:
    if arguments.json:
        return _print_json(found)
    text: Iterable[str] = lines(Screen.current())
    write(text)
    return 0


def _print_json(found: object) -> int:
    print(json.dumps(found, indent=2, allow_nan=False))
    return 0
