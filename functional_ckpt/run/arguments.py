"""The arguments of `save` and `load`, checked before any of them is used."""

import os
from collections.abc import Mapping
from typing import Any

from functional_ckpt.plan.field import refuse
from functional_ckpt.run.policy import LoadPolicy, SavePolicy

__all__ = ["check_flag", "check_load", "check_policy", "check_save"]


def check_save(
    function: str, state: object, path: object, policy: object, overwrite: object, attributes: object, progress: object
) -> None:
    """Raise `PolicyError` for an argument of another type than `function`, a save, takes.

    Examples
    --------
    >>> check_save("save", {}, "a", SavePolicy(), False, None, None)
    """
    _check_order(function, "state", state, path)
    check_policy(function, policy, SavePolicy)
    check_flag(function, "overwrite", overwrite)
    if attributes is not None and not isinstance(attributes, Mapping):
        raise refuse(function, "attributes", "a dict", attributes)
    _check_progress(function, progress)


def check_load(like: object, path: object, policy: object, progress: object) -> None:
    """Raise `PolicyError` for an argument of another type than `load` takes.

    Examples
    --------
    >>> check_load({}, "a", LoadPolicy(), None)
    """
    _check_order("load", "like", like, path)
    check_policy("load", policy, LoadPolicy)
    _check_progress("load", progress)


def check_policy(owner: object, policy: object, kind: type[SavePolicy] | type[LoadPolicy]) -> None:
    """Raise `PolicyError` unless `policy` is of `kind`; `owner` is the object, or the name of the function, to name.

    Examples
    --------
    >>> check_policy("save", SavePolicy(), SavePolicy)
    """
    if not isinstance(policy, kind):
        raise refuse(owner, "policy", f"a {kind.__name__}", policy)


def check_flag(owner: object, name: str, value: object) -> None:
    """Raise `PolicyError` unless the argument `name` is True or False: a text such as ``"no"`` would count as true.

    Examples
    --------
    >>> check_flag("save", "overwrite", False)
    """
    if not isinstance(value, bool):
        raise refuse(owner, name, "True or False", value)


def _check_order(function: str, name: str, first: object, path: object) -> None:
    if isinstance(first, str | os.PathLike) and not isinstance(path, str | os.PathLike):
        raise refuse(function, "path", "a path or URL", path, f"Call {function}({name}, path)")


def _check_progress(function: str, progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise refuse(function, "progress", "a function of a Progress", progress)
