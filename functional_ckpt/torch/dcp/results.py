"""Write results as `write_data` returns them and `finish` receives them: made only if somebody looks at them."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from functional_ckpt.torch.dcp.bridge import MetadataIndex, WriteResult, write_result
from functional_ckpt.torch.dcp.packed import WRITES, Items, Kind, Parcel, index_form, index_like

__all__ = ["PackedResults", "reported", "results_of"]


class PackedResults(list[WriteResult]):
    """Write results, which travel in the short form.

    Examples
    --------
    >>> import pickle
    >>> pickle.loads(pickle.dumps(PackedResults([])))
    []
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the short form, or a list."""
        return _sent(self, Items.of(_RESULTS, tuple(self)))


def _sent(results: PackedResults, items: Items | None) -> tuple[Any, ...]:
    """Return how pickle is to send results, which hold what is sent as long as they live."""
    if items is None:
        return list, (list(results),)
    results.parcel = Parcel.of(items)  # type: ignore[attr-defined]
    return _arrived, (results.parcel,)  # type: ignore[attr-defined]


def _arrived(parcel: Parcel) -> PackedResults:
    return _unopened(parcel.items(_RESULTS))


class _Unopened(PackedResults):
    """Results that nobody has looked at; any method of a list makes them."""

    _items: Items

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent(self, self._items)

    def __radd__(self, others: list[Any]) -> list[Any]:
        """Come before the method of a list, which would look into the memory of this one."""
        return others + list(self)


def _unopened(items: Items) -> PackedResults:
    results = _Unopened()
    results._items = items
    return results


def _opening(name: str) -> Callable[..., Any]:
    def opened(self: _Unopened, *arguments: Any, **options: Any) -> Any:
        items = self.__dict__.pop("_items", None)
        if items is not None:  # an argument of this call may have asked first
            self.__class__ = PackedResults
            list.extend(self, items.all())
        return getattr(self, name)(*arguments, **options)

    return opened


_OF_EVERY_OBJECT = {*vars(object), "__class_getitem__"} - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
                                                            "__repr__", "__sizeof__"}  # fmt: skip
for _name in vars(list).keys() - _OF_EVERY_OBJECT:
    setattr(_Unopened, _name, _opening(_name))


def results_of(planned: Items, nbytes: Sequence[int]) -> PackedResults:
    """Return the results of planned items; `nbytes` are those of each.

    Examples
    --------
    >>> from functional_ckpt.torch.dcp.bridge import SavePlan, byte_item
    >>> from functional_ckpt.torch.dcp.packed import planned_items
    >>> [result.size_in_bytes for result in results_of(planned_items(SavePlan([byte_item("step")])), [8])]
    [8]
    """
    if planned.kind is not WRITES:
        return PackedResults(map(write_result, planned.all(), nbytes))
    numbers: dict[tuple[int, int], int] = {}
    which = [numbers.setdefault(pair, len(numbers)) for pair in zip(planned.which, nbytes, strict=True)]
    first = [write_result(planned.first[number], each) for number, each in numbers]
    return _unopened(Items(_RESULTS, planned.names, which, first))


def reported(results: Iterable[Iterable[WriteResult]]) -> dict[Any, set[str]]:
    """Return the keys of results by the offset of their items; none is made that nobody has looked at.

    Examples
    --------
    >>> from functional_ckpt.torch.dcp.bridge import byte_item
    >>> reported([[write_result(byte_item("step"), 8)]])
    {None: {'step'}}
    """
    found: dict[Any, set[str]] = {}
    for each in results:
        if type(each) is _Unopened:
            items = each._items
            keys = [found.setdefault(result.index.offset, set()) for result in items.first]
            for name, number in zip(items.names, items.which, strict=True):
                keys[number].add(name)
        else:
            for result in each:
                found.setdefault(result.index.offset, set()).add(result.index.fqn)
    return found


_result_form = attrgetter("__class__", "size_in_bytes", "storage_data")


def _form(result: WriteResult) -> Any:
    own, index = _result_form(result), index_form(result.index)
    return (own, index) if own[0] is WriteResult and index[0] is MetadataIndex else None


def _like(result: WriteResult, name: str) -> WriteResult:
    return WriteResult(index_like(result.index, name), result.size_in_bytes, result.storage_data)


_RESULTS = Kind(attrgetter("index.fqn"), _form, _like)
