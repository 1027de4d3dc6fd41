"""The ``functional-ckpt`` command: look into a checkpoint, and check it, without torch.

``facts`` reads a checkpoint into plain dicts, which ``--json`` prints as they are; ``tables`` turns them into text.
"""

import os
import sys
from collections.abc import Sequence

from functional_ckpt.cli.completion import VARIABLE, candidates
from functional_ckpt.cli.parser import make_parser
from functional_ckpt.cli.screen import write
from functional_ckpt.errors import CheckpointError, CheckpointErrors, NotACheckpointError

__all__ = ["main"]


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
    parser = make_parser()
    if os.environ.get(VARIABLE):
        write(candidates(parser, sys.argv[1:] if argv is None else argv))
        return 0
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except NotACheckpointError as error:
        return _fail(error, 2)
    except CheckpointError as error:
        return _fail(error, 1)
    except (RecursionError, IndexError) as error:  # a value nested deeper than can be printed, a slice outside
        return _fail(error, 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: Exception, status: int) -> int:
    from functional_ckpt.show.text import clean

    problems = error.exceptions if isinstance(error, CheckpointErrors) else (error,)
    for problem in problems:
        print(f"functional-ckpt: {clean(str(problem))}", file=sys.stderr)
    return status
