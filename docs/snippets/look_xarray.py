# --8<-- [start:xarray]
import xarray

dataset = xarray.open_zarr("checkpoint")
print(dataset["model.w"].dims, float(dataset["model.w"].mean()))
# --8<-- [end:xarray]
