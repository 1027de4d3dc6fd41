# --8<-- [start:tensorstore]
import tensorstore as ts

files = {"driver": "file", "path": "checkpoint/model.w"}
w = ts.open({"driver": "zarr3", "kvstore": files}).result()
print(w.domain, w[0, :3].read().result())
# --8<-- [end:tensorstore]
