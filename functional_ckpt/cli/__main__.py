"""``python -m functional_ckpt.cli``, where the command itself is not on the path."""

import sys

from functional_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
