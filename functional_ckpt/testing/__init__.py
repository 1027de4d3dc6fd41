"""Property-test your own sharding code: Hypothesis strategies and laws for boxes, shards, worlds and plans.

`functional_ckpt.testing.strategies` generates values, `functional_ckpt.testing.laws` checks them, and
`functional_ckpt.testing.model` is the numpy model that both use. Strategies need Hypothesis (the extra
``functional_ckpt[testing]``); laws and model do not, and none of them needs torch or pytest.

Once installed, ``st.from_type(Box)`` and its like work by themselves: Hypothesis calls
`register_type_strategies` through its entry point when it is imported.

Examples
--------
Your function says which part of an array each rank holds. The law says that the parts tile the array:

>>> from hypothesis import given
>>> from functional_ckpt import errors
>>> from functional_ckpt.spec.shard import from_rank_offsets
>>> from functional_ckpt.testing import laws, strategies as fst
>>> @given(fst.meshes())
... def test_rows_over_all_ranks(mesh):
...     size = 1
...     for extent in mesh:
...         size *= extent
...     laws.check_tiles({r: [from_rank_offsets("w", "int8", (2, 3), (0, r, size))] for r in range(size)})
>>> test_rows_over_all_ranks()
"""

from importlib import import_module
from typing import Any

__all__ = ["register_type_strategies"]

_BY_TYPE = {
    "functional_ckpt.plan.layout": {"LayoutPolicy": "layout_policies"},
    "functional_ckpt.plan.manifest": {"Manifest": "manifests"},
    "functional_ckpt.spec.array": {"ArraySpec": "array_specs", "ObjectSpec": "object_specs"},
    "functional_ckpt.spec.box": {"Box": "any_boxes"},
    "functional_ckpt.spec.sharding": {"Fragment": "any_fragments", "ShardSpec": "any_shards", "World": "worlds"},
}


def register_type_strategies() -> None:
    """Make ``hypothesis.strategies.from_type`` know the values of this library.

    Only the types are imported now; the strategies are imported when a type is first used.

    Examples
    --------
    >>> from hypothesis import find, strategies as st
    >>> from functional_ckpt.spec.box import Box
    >>> register_type_strategies()
    >>> find(st.from_type(Box), lambda box: box.ndim == 1)
    Box(start=(0,), stop=(1,))
    """
    from hypothesis.strategies import register_type_strategy

    for module, names in _BY_TYPE.items():
        for type_name, strategy_name in names.items():
            register_type_strategy(getattr(import_module(module), type_name), _deferred(strategy_name))


def _deferred(strategy_name: str) -> Any:
    def resolve(_type: Any) -> Any:
        return getattr(import_module("functional_ckpt.testing.strategies"), strategy_name)()

    return resolve
