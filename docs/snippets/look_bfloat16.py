# ruff: noqa: E402 - each part of a page has the imports that it needs
import ml_dtypes
import numpy as np

import functional_ckpt

functional_ckpt.save({"h": np.ones(3, ml_dtypes.bfloat16)}, "half")
# --8<-- [start:bfloat16]
import zarr

import functional_ckpt.store.zarr_dtypes  # zarr-python learns the types

print(zarr.open_group("half", mode="r")["h"][:])
# --8<-- [end:bfloat16]
# --8<-- [start:bits]
layout = functional_ckpt.LayoutPolicy(extended_dtypes="bits")
policy = functional_ckpt.SavePolicy(layout=layout)
functional_ckpt.save({"h": np.ones(3, ml_dtypes.bfloat16)}, "bits", policy=policy)
print(zarr.open_group("bits", mode="r")["h"].dtype)  # what the file says
print(functional_ckpt.open_checkpoint("bits")["h"].dtype)  # what was saved
# --8<-- [end:bits]
