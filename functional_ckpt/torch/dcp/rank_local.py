"""Saves without DCP's collectives: one grid whatever the ranks hold, and a commit in which all ranks take part.

DCP then exchanges no plans, validates nothing across ranks and does not report failures to other ranks. Chunks may be
shared: their shape follows from shape, data type and codecs of the array alone, so that each rank finds the place of
its part without the specs of the others, and several ranks may write into one chunk under a lock. The commit: every
rank writes to one unpublished directory and reports that it is done; no rank returns before all have reported and the
directory has its final name. If a rank fails or is silent for `timeout_s`, the save is not published.
"""

import attrs

from functional_ckpt.run.policy import SavePolicy

__all__ = ["with_pure_grid"]

# No chunk with one writer is ever this large, so that arrays with several writers always get shared chunks.
_UNREACHABLE_NBYTES = 2**62


def with_pure_grid(policy: SavePolicy) -> SavePolicy:
    """Return a policy under which the grid of an array depends on its key, shape and data type only.

    Examples
    --------
    >>> from functional_ckpt.plan.ladder import layout_of_faces
    >>> from functional_ckpt.spec.array import ArraySpec
    >>> layout = with_pure_grid(SavePolicy()).layout
    >>> w = ArraySpec("w", (4096, 1024), "float32")
    >>> [layout_of_faces(w, faces, layout, owned_ok=False).chunk for faces in ((0, 0), (512, 0), (1, 256))]
    [(512, 1024), (512, 1024), (512, 1024)]
    """
    one_size = policy.layout.shared_chunk_nbytes
    layout = attrs.evolve(policy.layout, min_chunk_nbytes=_UNREACHABLE_NBYTES, target_chunk_nbytes=one_size)
    return attrs.evolve(policy, layout=layout)
