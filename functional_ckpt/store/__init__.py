"""Storage: the encoding of keys, values and arrays; stores; the execution of plans; commit. No other layer does I/O.

The names below are for stores of other packages: what such a store does, and what helps to write it.

Examples
--------
>>> from functional_ckpt.store import Capabilities
>>> Capabilities(shared_chunks=False, rename=False, shared=True).sized
True
"""

from typing import TYPE_CHECKING

from functional_ckpt.lazy import getattr_of

if TYPE_CHECKING:
    from functional_ckpt.store.access import StorePolicy
    from functional_ckpt.store.base import UNSIZED, Capabilities, Store, check_limit, storage_errors
    from functional_ckpt.store.lease import LeasedStore
    from functional_ckpt.store.opening import open_store
    from functional_ckpt.store.whole import WholeStore

__all__ = [
    "UNSIZED",
    "Capabilities",
    "LeasedStore",
    "Store",
    "StorePolicy",
    "WholeStore",
    "check_limit",
    "open_store",
    "storage_errors",
]

__getattr__ = getattr_of(
    __name__,
    {
        "UNSIZED": "base",
        "Capabilities": "base",
        "LeasedStore": "lease",
        "Store": "base",
        "StorePolicy": "access",
        "WholeStore": "whole",
        "check_limit": "base",
        "open_store": "opening",
        "storage_errors": "base",
    },
)
