"""What DCP's coordinator computes for one save, with torch's own planner and writer.

The order of the calls is that of ``_save_state_dict``: the coordinator unpickles the local plans of all ranks
(``gather_object``), dedups, merges and validates them (``DefaultSavePlanner.create_global_plan``, then the writer's
``prepare_global_plan``), and pickles one plan per rank (``scatter_object_list``). When all have written it unpickles
their results (``gather_object``) and ``finish`` pickles the metadata into a file. Ranks build their plans and results
outside of the timing. What travels is not counted, nor the second pickling of the metadata, for the ranks.

The cuts are uneven, so the write items are those of a `ShardedTensor` with such shards; for a DTensor they would differ
in nothing but their numbers.
"""

import pickle
import tempfile
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.planning_world import COLUMNS, DTYPE, RowCuts
from benchmarks.stages import Stages

_DTYPE = getattr(torch, DTYPE)


def plan_dcp(cuts: RowCuts) -> dict[str, float]:
    """Return the CPU seconds of each stage."""
    stages = Stages()
    messages = [pickle.dumps(_local_plan(cuts, rank)) for rank in range(cuts.ranks)]
    planner = DefaultSavePlanner()
    with tempfile.TemporaryDirectory() as directory:
        writer = FileSystemWriter(Path(directory), sync_files=False)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        with stages("gather"):
            plans = [pickle.loads(message) for message in messages]
        messages.clear()
        with stages("plan"):
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
        with stages("scatter"):
            messages = [pickle.dumps(plan) for plan in plans]
        messages.clear()
        del plans
        messages = [pickle.dumps(_results(cuts, rank)) for rank in range(cuts.ranks)]
        with stages("metadata"):
            writer.finish(metadata, [pickle.loads(message) for message in messages])
    return stages.cpu_s


def _local_plan(cuts: RowCuts, rank: int) -> SavePlan:
    items = [_write_item(cuts, key, array, rank) for array, key in enumerate(cuts.keys)]
    # Where each key stands in the nested dict, as flattening leaves it.
    mapping = {key: tuple(key.split(".", 1)) for key in cuts.keys}
    return SavePlan(items, planner_data=mapping)


def _write_item(cuts: RowCuts, key: str, array: int, rank: int) -> WriteItem:
    start, stop = cuts.rows(array, rank)
    offsets, sizes = torch.Size((start, 0)), torch.Size((stop - start, COLUMNS))
    return WriteItem(
        index=MetadataIndex(key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=_DTYPE),
            size=torch.Size(cuts.shape(array)),
        ),
    )


def _results(cuts: RowCuts, rank: int) -> list[WriteResult]:
    """What a rank reports: one file per rank, one entry per shard."""
    results = []
    offset = 0
    for array, key in enumerate(cuts.keys):
        start, stop = cuts.rows(array, rank)
        length = (stop - start) * COLUMNS * _DTYPE.itemsize
        # Chunks of a tensor are numbered as their plans come, in the order of the ranks.
        index = MetadataIndex(key, torch.Size((start, 0)), rank)
        results.append(WriteResult(index, length, _StorageInfo(f"__{rank}_0.distcp", offset, length)))
        offset += length
    return results
