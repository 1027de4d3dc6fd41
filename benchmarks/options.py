"""What the programs share on their command lines."""

import argparse
import sys
from typing import TypeVar

import attrs

_Size = TypeVar("_Size", bound=attrs.AttrsInstance)


def new_parser(program: str, description: str | None, rounds: bool = True) -> argparse.ArgumentParser:
    """A parser that knows ``--quick``, and ``--rounds`` where there are rounds; the program adds the rest."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    if rounds:
        parser.add_argument("--rounds", type=int, help="rounds of each measurement")
    return parser


def chosen_size(chosen: argparse.Namespace, full: _Size, quick: _Size) -> _Size:
    """The sizes that the options choose, with their `rounds`."""
    size = quick if chosen.quick else full
    return attrs.evolve(size, rounds=chosen.rounds) if chosen.rounds else size


def tell(step: str) -> None:
    """Say on standard error what is being done."""
    print(step, file=sys.stderr, flush=True)
