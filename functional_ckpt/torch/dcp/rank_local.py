"""Saves without DCP's collectives: one grid whatever the ranks hold, and a commit in which all ranks take part.

DCP exchanges no plans then, validates nothing across ranks and does not tell them of failures. Chunks may be
shared: their shape follows from shape, data type and codecs of the array alone, so that any rank can tell where
its part belongs without knowing the others', and several ranks may write into one chunk under a lock. The rule of the
commit: every rank writes to one unpublished directory and says so; no rank returns before all have said so and the
directory has its name, and if one of them fails or is silent for `timeout_s`, nobody publishes.
"""

import attrs

from functional_ckpt.run.policy import SavePolicy

__all__ = ["with_pure_grid"]

# No chunk of one writer is ever this large, so that arrays that ranks share always go to shared chunks.
_UNREACHABLE_NBYTES = 2**62


def with_pure_grid(policy: SavePolicy) -> SavePolicy:
    """Return a policy under which the grid of an array depends on its key, shape and data type only.

    Examples
    --------
    >>> from functional_ckpt.plan.layout import layout_of_faces
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> layout = with_pure_grid(SavePolicy()).layout
    >>> w = ArraySpec("w", (4096, 1024), "float32")
    >>> [layout_of_faces(w, faces, layout, owned_ok=False).chunk for faces in ((0, 0), (512, 0), (1, 256))]
    [(512, 1024), (512, 1024), (512, 1024)]
    """
    one_size = policy.layout.shared_chunk_nbytes
    layout = attrs.evolve(policy.layout, min_chunk_nbytes=_UNREACHABLE_NBYTES, target_chunk_nbytes=one_size)
    return attrs.evolve(policy, layout=layout)
