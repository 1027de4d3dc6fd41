"""How a cost grows: the power law through measured points, by least squares on logarithms."""

from collections.abc import Iterable

import attrs
import numpy as np


@attrs.frozen
class PowerLaw:
    """``factor * n ** exponent``."""

    factor: float
    exponent: float

    def at(self, n: float) -> float:
        return self.factor * n**self.exponent


def fit(points: Iterable[tuple[float, float]]) -> PowerLaw | None:
    """Fit ``(n, cost)`` pairs; None for fewer than two.

    Examples
    --------
    >>> law = fit([(1, 3.0), (10, 300.0), (100, 30000.0)])
    >>> round(law.factor, 6), round(law.exponent, 6)
    (3.0, 2.0)
    """
    pairs = np.log(list(points))
    if len(pairs) < 2:
        return None
    exponent, constant = np.polyfit(pairs[:, 0], pairs[:, 1], 1)
    return PowerLaw(float(np.exp(constant)), float(exponent))
