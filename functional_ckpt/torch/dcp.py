"""The bridge to ``torch.distributed.checkpoint``: the one module that imports it, and makes its values."""

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from functional_ckpt.spec.box import Box

__all__ = ["ChunkStorageMetadata", "MetadataIndex", "WriteItem", "chunk_of", "write_item"]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return a region of a global tensor as DCP describes it.

    Examples
    --------
    >>> chunk_of(Box((0, 2), (4, 6)))
    ChunkStorageMetadata(offsets=torch.Size([0, 2]), sizes=torch.Size([4, 4]))
    """
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


def write_item(name: str, box: Box, global_shape: tuple[int, ...], dtype: torch.dtype, hint: int | None) -> WriteItem:
    """Return DCP's order to write region `box` of the tensor `name`; `hint` is its position among the local ones.

    Examples
    --------
    >>> write_item("w", Box((2,), (4,)), (6,), torch.float32, None).index.offset
    torch.Size([2])
    """
    return WriteItem(
        index=MetadataIndex(name, torch.Size(box.start), hint),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk_of(box), properties=TensorProperties(dtype=dtype), size=torch.Size(global_shape)
        ),
    )
