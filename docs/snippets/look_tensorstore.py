# --8<-- [start:tensorstore]
import tensorstore as ts

w = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": "checkpoint/model.w"}}).result()
print(w.domain, w[0, :3].read().result())
# --8<-- [end:tensorstore]
