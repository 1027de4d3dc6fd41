"""Errors that are also of the type that Megatron raises at the same place, so that code written for it catches them."""

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from functional_ckpt.errors import DTypeError, PolicyError, ProblemError, ShapeError, SpecError, UnsupportedLeafError

__all__ = [
    "AlgorithmError",
    "AxisError",
    "DTypeAssertionError",
    "LeafAssertionError",
    "NarrowError",
    "ShapeAssertionError",
    "SpecAssertionError",
    "asserted",
    "asserting",
]


class AxisError(ShapeError, IndexError):
    """An axis does not exist in the tensor.

    Examples
    --------
    >>> issubclass(AxisError, ProblemError) and issubclass(AxisError, IndexError)
    True
    """


class NarrowError(ShapeError, RuntimeError):
    """A narrowed range leaves the local tensor, where torch raises a ``RuntimeError``."""


class AlgorithmError(PolicyError, NotImplementedError):
    """An unknown exchange algorithm."""


class SpecAssertionError(SpecError, AssertionError):
    """A `SpecError` where Megatron asserts."""


class ShapeAssertionError(ShapeError, AssertionError):
    """A `ShapeError` where Megatron asserts."""


class DTypeAssertionError(DTypeError, AssertionError):
    """A `DTypeError` where Megatron asserts."""


class LeafAssertionError(UnsupportedLeafError, AssertionError):
    """An `UnsupportedLeafError` where Megatron asserts."""


_ASSERTED: dict[type[ProblemError], type[ProblemError]] = {
    ShapeError: ShapeAssertionError,
    DTypeError: DTypeAssertionError,
}


def asserted(problem: ProblemError) -> ProblemError:
    """Return a `ShapeError` or `DTypeError` as one that is also an ``AssertionError``; any other problem as it is.

    Examples
    --------
    >>> asserted(ShapeError("too long", "w"))
    ShapeAssertionError(what='too long', key='w', rank=None, ...)
    """
    kind = _ASSERTED.get(type(problem))
    return problem if kind is None else kind(**attrs.asdict(problem, recurse=False))


@contextmanager
def asserting() -> Iterator[None]:
    """Raise a `ShapeError` as one that is also an ``AssertionError``.

    Examples
    --------
    >>> with asserting():
    ...     raise ShapeError("too long")
    Traceback (most recent call last):
    ...
    functional_ckpt.torch.megatron.exceptions.ShapeAssertionError: too long
    """
    try:
        yield
    except ShapeError as problem:
        raise asserted(problem) from None
