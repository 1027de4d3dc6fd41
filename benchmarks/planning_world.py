"""An irregular world for planning benchmarks: arrays cut by rows, each at other places, without any data."""

import attrs
import numpy as np

COLUMNS = 1024
DTYPE = "bfloat16"
_MOST_ROWS = 128


@attrs.frozen(eq=False)
class RowCuts:
    """Rank `r` holds the rows ``[bounds[a, r], bounds[a, r + 1])`` of array number `a`; none is empty."""

    bounds: np.ndarray

    @property
    def arrays(self) -> int:
        return self.bounds.shape[0]

    @property
    def ranks(self) -> int:
        return self.bounds.shape[1] - 1

    @property
    def shards(self) -> int:
        return self.arrays * self.ranks

    @property
    def keys(self) -> list[str]:
        return [f"model.layers.{number}.weight" for number in range(self.arrays)]

    def shape(self, array: int) -> tuple[int, int]:
        """Shape of a whole array."""
        return int(self.bounds[array, -1]), COLUMNS

    def rows(self, array: int, rank: int) -> tuple[int, int]:
        """First row of a shard, and the row after its last."""
        start, stop = self.bounds[array, rank : rank + 2].tolist()
        return start, stop


def irregular(ranks: int, arrays: int) -> RowCuts:
    """A world of shards of 1 to 127 rows, as large on many ranks as on few; the same on every call.

    Examples
    --------
    >>> irregular(4, 2).bounds.shape
    (2, 5)
    """
    lengths = np.random.default_rng(0).integers(1, _MOST_ROWS, (arrays, ranks))
    return RowCuts(np.concatenate([np.zeros((arrays, 1), np.int64), lengths.cumsum(axis=1)], axis=1))
