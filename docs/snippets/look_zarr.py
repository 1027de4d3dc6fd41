# --8<-- [start:zarr]
import zarr

group = zarr.open_group("checkpoint", mode="r")
print(group.tree())
print(group["model.w"][:2, :3])
print(group.attrs["run"], group.attrs["functional_ckpt"]["values"]["step"])
# --8<-- [end:zarr]
