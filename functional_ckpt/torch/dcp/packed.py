"""Plans and metadata of DCP, in the short form in which they travel between ranks.

DCP pickles them item by item, and the item of one tensor is five objects. But thousands of tensors differ by name only.
So the names travel, and each form once, as an item that DCP itself can pickle. What arrives is equal to what was sent,
and of DCP's own classes once somebody has looked into it; till then it is passed on as it came.
Items of a kind that is not known here, such as a subclass, travel as DCP sends them.
"""

import pickle
import secrets
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import attrs

from functional_ckpt.torch.dcp.bridge import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteResult,
)

__all__ = [
    "WRITES", "Items", "Kind", "Parcel", "index_form", "index_like", "pack_metadata", "packed_load_plan",
    "packed_save_plan", "planned_items",
]  # fmt: skip


def packed_save_plan(plan: SavePlan) -> SavePlan:
    """Return a plan with the same items, which travels in the short form.

    Examples
    --------
    >>> from functional_ckpt.torch.dcp.bridge import byte_item
    >>> plan = SavePlan([byte_item("step")])
    >>> pickle.loads(pickle.dumps(packed_save_plan(plan))) == plan
    True
    """
    return _SentSavePlan(**_fields(plan)) if type(plan) is SavePlan else plan


def packed_load_plan(plan: LoadPlan) -> LoadPlan:
    """Return a plan with the same items, which travels in the short form.

    Examples
    --------
    >>> pickle.loads(pickle.dumps(packed_load_plan(LoadPlan([])))) == LoadPlan([])
    True
    """
    return _SentLoadPlan(**_fields(plan)) if type(plan) is LoadPlan else plan


def pack_metadata(metadata: Metadata) -> None:
    """Let metadata travel in the short form the next time that they are pickled, and later as always.

    Examples
    --------
    >>> metadata = Metadata({"step": BytesStorageMetadata()})
    >>> pack_metadata(metadata)
    >>> pickle.loads(pickle.dumps(metadata)) == metadata
    True
    """
    if type(metadata) is Metadata:
        metadata.__class__ = _SentMetadata


@attrs.frozen
class Kind:
    """How objects are taken apart into `name` and `form`, and `made` from another one of that form and a name.

    `form` is None for an object that is more than these two tell.
    """

    name: Callable[[Any], str]
    form: Callable[[Any], Hashable]
    made: Callable[[Any, str], Any]


@attrs.frozen(eq=False)
class Items:
    """Items of a plan or of results by what they have in common: thousands of tensors differ by name only.

    Number n is named ``names[n]`` and is otherwise like ``first[which[n]]``. `own` are the items themselves, if this
    process has them; else `kind` makes them.
    """

    kind: Kind
    names: Sequence[str]
    which: Sequence[int]
    first: Sequence[Any]
    own: Sequence[Any] | None = None

    @classmethod
    def of(cls, kind: Kind, own: Sequence[Any]) -> "Items | None":
        """Return items taken apart; None if one of them cannot be."""
        if any(len(fields(each)) != count for each, count in _COUNTS.items()):
            return None
        numbers: dict[Hashable, int] = {None: -1}
        first: list[Any] = []
        which: list[int] = []
        try:
            for item in own:
                number = numbers.setdefault(kind.form(item), len(first))
                if number == len(first):
                    first.append(item)
                which.append(number)
        except (AttributeError, TypeError):  # a field is not what DCP says that it is
            return None
        return None if -1 in which else cls(kind, [*map(kind.name, own)], which, first, own)

    @classmethod
    def unpacked(cls, kind: Kind, data: bytes) -> "Items":
        """Return items that `pack` has packed."""
        return cls(kind, *pickle.loads(data))  # noqa: S301 - from ranks of this group, never from storage

    def pack(self) -> bytes:
        """Return the short form."""
        return pickle.dumps((self.names, self.which, self.first), pickle.HIGHEST_PROTOCOL)

    def item(self, number: int) -> Any:
        """Return one item."""
        if self.own is not None:
            return self.own[number]
        return self.kind.made(self.first[self.which[number]], self.names[number])

    def all(self) -> list[Any]:
        """Return a new list of the items."""
        if self.own is not None:
            return list(self.own)
        return [*map(self.kind.made, map(self.first.__getitem__, self.which), self.names)]


def planned_items(plan: SavePlan) -> Items:
    """Return the items of a plan that is to be written; none is made of a plan that nobody has looked into.

    Examples
    --------
    >>> from functional_ckpt.torch.dcp.bridge import byte_item
    >>> planned_items(SavePlan([byte_item("a"), byte_item("b")])).which
    [0, 0]
    """
    parcel = vars(plan).get("_parcel") if type(plan) is _ArrivedSavePlan else None
    if parcel is not None:
        found: Items = parcel.items(WRITES)
        return found
    own = tuple(plan.items)
    return Items.of(WRITES, own) or Items(_ALONE, [*map(_ALONE.name, own)], range(len(own)), own, own)


@attrs.frozen(eq=False)
class Parcel:
    """Packed items on their way. The process that has sent them, and still holds the parcel, finds its own in it."""

    data: bytes
    token: bytes
    sent: Items | None = None

    @classmethod
    def of(cls, items: Items) -> "Parcel":
        """Return items to be sent."""
        parcel = cls(items.pack(), secrets.token_bytes(16), items)
        _SENT[parcel.token] = parcel
        return parcel

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.data, self.token)

    def items(self, kind: Kind) -> Items:
        """Return what was packed."""
        return Items.unpacked(kind, self.data) if self.sent is None else self.sent


def _received(data: bytes, token: bytes) -> Parcel:
    return _SENT.get(token) or Parcel(data, token)


#: By random tokens: no other items ever have the same.
_SENT: WeakValueDictionary[bytes, Parcel] = WeakValueDictionary()


#: How many fields the forms below tell, with the name; a later DCP may add some, and then sends all as it does.
_COUNTS = {
    MetadataIndex: 3, WriteItem: 4, TensorWriteData: 3, ChunkStorageMetadata: 2, ReadItem: 6, WriteResult: 3,
    TensorStorageMetadata: 3, BytesStorageMetadata: 0,
}  # fmt: skip
_PROPERTIES = tuple(field.name for field in fields(TensorProperties))
index_form = attrgetter("__class__", "offset", "index")
_chunk_form = attrgetter("__class__", "offsets", "sizes")
_properties_form = attrgetter("__class__", *_PROPERTIES)
_OF_WRITE = ("__class__", "index.__class__", "type", "bytes_io_data", "index.offset", "index.index")
_OF_TENSOR = ("__class__", "chunk.__class__", "properties.__class__", "size", "chunk.offsets", "chunk.sizes")
_write_form = attrgetter(*_OF_WRITE)
# One call for all fields: it takes half as long as one for each object.
_tensor_form = attrgetter(
    *_OF_WRITE, *(f"tensor_data.{name}" for name in (*_OF_TENSOR, *(f"properties.{field}" for field in _PROPERTIES)))
)
_read_form = attrgetter("__class__", "type", "dest_offsets", "storage_offsets", "lengths")


def _form_of_write(item: WriteItem) -> Hashable:
    form = (_write_form if item.tensor_data is None else _tensor_form)(item)
    is_known = form[:2] == (WriteItem, MetadataIndex) and form[6:9] in _OF_DCP
    return form if is_known else None


#: The classes of what belongs to a tensor's item, or nothing.
_OF_DCP = ((TensorWriteData, ChunkStorageMetadata, TensorProperties), ())


def _write_like(item: WriteItem, name: str) -> WriteItem:
    data = item.tensor_data
    if data is not None:
        data = TensorWriteData(_chunk_like(data.chunk), _properties_like(data.properties), data.size)
    return WriteItem(index_like(item.index, name), item.type, item.bytes_io_data, data)


def _form_of_read(item: ReadItem) -> Hashable:
    own, into, stored = _read_form(item), index_form(item.dest_index), index_form(item.storage_index)
    if own[0] is not ReadItem or into[0] is not MetadataIndex or stored[0] is not MetadataIndex:
        return None
    name = item.storage_index.fqn
    return own, into, stored, None if name == item.dest_index.fqn else name


def _read_like(item: ReadItem, name: str) -> ReadItem:
    stored = item.storage_index
    stored = index_like(stored, name) if stored.fqn == item.dest_index.fqn else stored
    into = index_like(item.dest_index, name)
    return ReadItem(item.type, into, item.dest_offsets, stored, item.storage_offsets, item.lengths)


def _form_of_stored(pair: tuple[str, Any]) -> Hashable:
    value = pair[1]
    if type(value) is BytesStorageMetadata:
        return BytesStorageMetadata
    chunks = tuple(map(_chunk_form, value.chunks))
    properties = _properties_form(value.properties)
    is_known = type(value) is TensorStorageMetadata and properties[0] is TensorProperties
    return (value.size, properties, chunks) if is_known and all(c[0] is ChunkStorageMetadata for c in chunks) else None


def _stored_like(pair: tuple[str, Any], name: str) -> tuple[str, Any]:
    value = pair[1]
    if type(value) is BytesStorageMetadata:
        return name, BytesStorageMetadata()
    chunks = [_chunk_like(chunk) for chunk in value.chunks]
    return name, TensorStorageMetadata(_properties_like(value.properties), value.size, chunks)


# Whoever got the items may change these: each item has its own.
def _chunk_like(chunk: ChunkStorageMetadata) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(chunk.offsets, chunk.sizes)


def _properties_like(properties: TensorProperties) -> TensorProperties:
    return TensorProperties(*_properties_form(properties)[1:])


def index_like(index: MetadataIndex, name: str) -> MetadataIndex:
    """Return the index of another name; `index_form` tells all else. Its own way to be made copies the offset first."""
    made = object.__new__(MetadataIndex)
    object.__setattr__(made, "fqn", name)
    object.__setattr__(made, "offset", index.offset)
    object.__setattr__(made, "index", index.index)
    return made


WRITES = Kind(attrgetter("index.fqn"), _form_of_write, _write_like)
_READS = Kind(attrgetter("dest_index.fqn"), _form_of_read, _read_like)
#: Items of which one is of a user's own class: each is like no other.
_ALONE = Kind(WRITES.name, id, lambda item, _: item)
_STORED = Kind(itemgetter(0), _form_of_stored, _stored_like)


class _Standin:
    """Stands in for an object of DCP: is equal to it, reads as it, and its copies are of DCP's own class."""

    _own: ClassVar[type]

    def _plain(self) -> Any:
        return self._own(**_fields(self))

    def __eq__(self, other: object) -> bool:
        return bool(self._plain() == (other._plain() if isinstance(other, _Standin) else other))

    def __repr__(self) -> str:
        return repr(self._plain())

    def __copy__(self) -> Any:
        return self._plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own(**deepcopy(_fields(self), memo))


class _Arrived(_Standin):
    """What arrived lacks one field, and holds it packed: it is made when somebody asks for it."""

    _field: ClassVar[str]
    _kind: ClassVar[Kind]

    @classmethod
    def sent_as(cls, value: Any) -> tuple[Any, ...]:
        """Return how pickle is to send `value`."""
        others = _fields(value)
        whole = others.pop(cls._field)
        items = Items.of(cls._kind, tuple(whole.items() if isinstance(whole, dict) else whole))
        if items is None:
            return _made, (cls._own, {**others, cls._field: whole})
        parcel = Parcel.of(items)
        if type(value) is not cls._own:  # held as long as this way of sending it
            value.__dict__["_parcel"] = parcel
        return _made, (cls, {**others, "_parcel": parcel})

    def __getattr__(self, name: str) -> Any:
        if name != self._field or "_parcel" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        items = self.__dict__.pop("_parcel").items(self._kind).all()
        self.__dict__[name] = dict(items) if self._kind is _STORED else items
        object.__setattr__(self, "__class__", self._own)
        return self.__dict__[name]

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        """Return DCP's own: so does ``dataclasses.replace``."""
        return cls._own(*arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), dict(self.__dict__))


def _made(cls: type, state: dict[str, Any]) -> Any:
    value: Any = object.__new__(cls)
    value.__dict__.update(state)
    return value


class _ArrivedSavePlan(_Arrived, SavePlan):
    _own, _field, _kind = SavePlan, "items", WRITES


class _ArrivedLoadPlan(_Arrived, LoadPlan):
    _own, _field, _kind = LoadPlan, "items", _READS


class _ArrivedMetadata(_Arrived, Metadata):
    _own, _field, _kind = Metadata, "state_dict_metadata", _STORED


class _SentSavePlan(_Standin, SavePlan):
    _own = SavePlan

    def __reduce__(self) -> tuple[Any, ...]:
        return _ArrivedSavePlan.sent_as(self)


class _SentLoadPlan(_Standin, LoadPlan):
    _own = LoadPlan

    def __reduce__(self) -> tuple[Any, ...]:
        return _ArrivedLoadPlan.sent_as(self)


class _SentMetadata(_Standin, Metadata):
    _own = Metadata

    def __reduce__(self) -> tuple[Any, ...]:
        object.__setattr__(self, "__class__", Metadata)
        return _ArrivedMetadata.sent_as(self)


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
