"""Hypothesis strategies for all inputs of this library, from shapes to corrupted worlds.

They construct values and rarely filter, draw structure before data, and shrink toward one whole array on one rank.

Examples
--------
>>> from hypothesis import find
>>> from functional_ckpt.testing import strategies as fst
>>> array, world, buffers = find(fst.sharded_arrays(key="w"), lambda case: case[1].size == 2)
>>> world.by_key().keys()
dict_keys(['w'])
"""

from functional_ckpt.testing.faults import Fault, corruptions, mangled_manifests
from functional_ckpt.testing.plans import (
    joining_policies,
    json_values,
    layout_policies,
    manifests,
    moving_policies,
    policies,
    regular_shards,
    regular_worlds,
)
from functional_ckpt.testing.regions import (
    any_boxes,
    boxes,
    flat_splits,
    grid_tilings,
    guillotine_tilings,
    shapes,
    tilings,
    uneven_tilings,
)
from functional_ckpt.testing.shardings import (
    any_fragments,
    any_shards,
    array_specs,
    dtypes,
    keys,
    meshes,
    object_specs,
    placed_arrays,
    placed_worlds,
    placements,
    replica_ids,
    scattered,
    shardings,
    shards,
    worlds,
)
from functional_ckpt.testing.values import (
    arrays,
    plain_values,
    sharded_arrays,
    special_words,
    state_trees,
    text_keys,
)

__all__ = [
    "Fault",
    "any_boxes",
    "any_fragments",
    "any_shards",
    "array_specs",
    "arrays",
    "boxes",
    "corruptions",
    "dtypes",
    "flat_splits",
    "grid_tilings",
    "guillotine_tilings",
    "joining_policies",
    "json_values",
    "keys",
    "layout_policies",
    "mangled_manifests",
    "manifests",
    "meshes",
    "moving_policies",
    "object_specs",
    "placed_arrays",
    "placed_worlds",
    "placements",
    "plain_values",
    "policies",
    "regular_shards",
    "regular_worlds",
    "replica_ids",
    "scattered",
    "shapes",
    "sharded_arrays",
    "shardings",
    "shards",
    "special_words",
    "state_trees",
    "text_keys",
    "tilings",
    "uneven_tilings",
    "worlds",
]
