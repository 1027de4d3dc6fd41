"""Arrays of bfloat16 and float8 pass between TensorStore and zarr-python bit for bit."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import zarr
from zarr.dtype import data_type_registry, parse_dtype

import functional_ckpt.store.zarr_dtypes as zarr_dtypes

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
CLASSES = {getattr(zarr_dtypes, name)._zarr_v3_name: name for name in zarr_dtypes.__all__}


def every_value(name: str) -> np.ndarray[Any, Any]:
    """Every bit pattern of a type: -0.0, infinities, subnormals and all NaN payloads."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    patterns = np.arange(1 << (8 * dtype.itemsize), dtype=np.uint32).astype(unsigned)
    values: np.ndarray[Any, Any] = patterns.view(dtype).reshape(16, -1)
    return values


def write_with_tensorstore(path: Path, name: str, values: Any, **metadata: Any) -> None:
    grid = {"name": "regular", "configuration": {"chunk_shape": [5, values.shape[1]]}}
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(path)},
            "metadata": {
                "shape": list(values.shape),
                "data_type": name,
                "chunk_grid": grid,
                **metadata,
            },
            "store_data_equal_to_fill_value": True,
        },
        create=True,
    ).result()
    array.write(values).result()


def read_with_tensorstore(path: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return ts.open(spec, open=True).result().read().result()


def stored_metadata(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "zarr.json").read_text())
    return document


def test_every_name_has_a_class() -> None:
    assert set(CLASSES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_zarr_reads_what_tensorstore_wrote(tmp_path: Path, name: str) -> None:
    values = every_value(name)
    write_with_tensorstore(tmp_path / "a", name, values)
    array = zarr.open_array(tmp_path / "a", mode="r")
    got = np.asarray(array[:])
    assert array.dtype == values.dtype
    assert got.dtype == values.dtype
    assert got.tobytes() == values.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spelling", ["name", "numpy"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # zarr compares signalling NaNs
def test_tensorstore_reads_what_zarr_wrote(tmp_path: Path, name: str, spelling: str) -> None:
    values = every_value(name)
    array = zarr.create_array(
        tmp_path / "a",
        shape=values.shape,
        chunks=(5, values.shape[1]),
        dtype=name if spelling == "name" else values.dtype,
    )
    array[:] = values
    got = read_with_tensorstore(tmp_path / "a")
    assert stored_metadata(tmp_path / "a")["data_type"] == name
    assert got.dtype == values.dtype
    assert got.tobytes() == values.tobytes()


def test_either_byte_order_of_bfloat16(tmp_path: Path) -> None:
    values = every_value("bfloat16")
    for endian in ("little", "big"):
        codec = {"name": "bytes", "configuration": {"endian": endian}}
        write_with_tensorstore(tmp_path / endian, "bfloat16", values, codecs=[codec])
        got = np.asarray(zarr.open_array(tmp_path / endian, mode="r")[:])
        assert got.astype(values.dtype).tobytes() == values.tobytes()
    swapped = values.dtype.newbyteorder("S")
    assert parse_dtype(swapped, zarr_format=3).to_native_dtype() == swapped


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_a_group_of_them_can_be_listed(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path)
    group.create_array("float32", shape=(2,), dtype="float32")
    for name in NAMES:
        write_with_tensorstore(tmp_path / name, name, every_value(name))
    found = zarr.open_group(tmp_path, mode="r")
    assert sorted(found.keys()) == sorted(("float32", *NAMES))
    found_types = {name: array.dtype for name, array in found.arrays() if name in NAMES}
    assert found_types == {name: np.dtype(getattr(ml_dtypes, name)) for name in NAMES}
    zarr.consolidate_metadata(tmp_path)
    assert len(dict(zarr.open_group(tmp_path, mode="r").members())) == len(NAMES) + 1


@pytest.mark.parametrize("name", NAMES)
def test_every_fill_value_survives_json_and_tensorstore(tmp_path: Path, name: str) -> None:
    data_type = parse_dtype(name, zarr_format=3)
    values = every_value(name).reshape(-1)
    step = 1 if values.itemsize == 1 else 1009
    for value in (*values[::step], *values[-2:]):
        text = data_type.to_json_scalar(value, zarr_format=3)
        again = data_type.from_json_scalar(json.loads(json.dumps(text)), zarr_format=3)
        assert np.asarray(again).tobytes() == value.tobytes()
    for index in range(0, values.size, values.size // 16 + 3):
        path = tmp_path / str(index)
        zarr.create_array(path, shape=(1,), dtype=name, fill_value=values[index])
        assert read_with_tensorstore(path).tobytes() == values[index : index + 1].tobytes()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "float8_e8m0fnu"])
@pytest.mark.parametrize("form", [0, 1.5, "-0.0", "NaN", "Infinity", "-Infinity", "bits", None])
def test_fill_values_of_tensorstore_are_understood(tmp_path: Path, name: str, form: Any) -> None:
    values = every_value(name)
    fill = {"bits": f"{0x81:#0{2 + 2 * values.itemsize}x}", "-0.0": -0.0}.get(form, form)
    metadata = {} if fill is None else {"fill_value": fill}
    write_with_tensorstore(tmp_path / "a", name, values, **metadata)
    (tmp_path / "a" / "c" / "1" / "0").unlink()
    got = np.asarray(zarr.open_array(tmp_path / "a", mode="r")[5:10])
    assert got.tobytes() == read_with_tensorstore(tmp_path / "a")[5:10].tobytes()


@pytest.mark.parametrize("form", [0.0, "NaN", "0x00", "0x7f", "0xff"])
def test_fill_values_of_float8_e8m0fnu(tmp_path: Path, form: Any) -> None:
    zarr.create_array(tmp_path, shape=(2,), dtype="float8_e8m0fnu")
    document = {**stored_metadata(tmp_path), "fill_value": form}
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    got = np.asarray(zarr.open_array(tmp_path, mode="r")[:])
    assert got.tobytes() == read_with_tensorstore(tmp_path).tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", ["abc", "0xzz", "0x123456", "nan ", None, (1,), 1j])
def test_other_fill_values_are_refused(name: str, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_dtype(name, zarr_format=3).from_json_scalar(bad, zarr_format=3)


@pytest.mark.parametrize("name", NAMES)
def test_zarr_v2_is_refused(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    with pytest.raises(ValueError, match="needs Zarr format 3"):
        zarr.create_array({}, shape=(2,), dtype=dtype, zarr_format=2)


@pytest.mark.parametrize("name", NAMES)
def test_data_types_pickle(name: str) -> None:
    data_type = parse_dtype(name, zarr_format=3)
    again = pickle.loads(pickle.dumps(data_type))
    assert again == data_type
    assert type(again) is type(data_type)


def run_fresh(code: str) -> None:
    """Run code in a fresh interpreter, whose registry nothing has touched."""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_registering_twice_is_harmless() -> None:
    run_fresh(
        """
import sys
import ml_dtypes, numpy as np
import functional_ckpt.store.zarr_dtypes as first
from zarr.dtype import data_type_registry, parse_dtype
before = dict(data_type_registry.contents)
for name in first.__all__:  # what zarr >= 3.4.1 does with our entry points
    cls = getattr(first, name)
    data_type_registry.register(cls._zarr_v3_name, cls)
assert data_type_registry.contents == before
del sys.modules["functional_ckpt.store.zarr_dtypes"]
import functional_ckpt.store.zarr_dtypes as second
assert data_type_registry.contents == before
assert second.BFloat16 is first.BFloat16
assert type(parse_dtype(np.dtype(ml_dtypes.bfloat16), zarr_format=3)) is first.BFloat16
"""
    )


def test_an_existing_registration_is_respected() -> None:
    run_fresh(
        """
import ml_dtypes, numpy as np
from zarr.dtype import Float32, data_type_registry, parse_dtype
class Theirs(Float32):
    _zarr_v3_name = "bfloat16"
data_type_registry.register("bfloat16", Theirs)
import functional_ckpt.store.zarr_dtypes as ours
assert data_type_registry.contents["bfloat16"] is Theirs
assert ours.BFloat16 is Theirs  # so the entry point cannot displace it either
assert type(parse_dtype("bfloat16", zarr_format=3)) is Theirs
assert type(parse_dtype("float8_e5m2", zarr_format=3)) is ours.Float8E5M2
"""
    )


def test_registered_here() -> None:
    assert all(data_type_registry.contents[name] is getattr(zarr_dtypes, CLASSES[name]) for name in NAMES)
