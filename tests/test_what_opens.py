"""The table of docs/inspect.md: which tool opens a checkpoint that holds what. Every cell is run."""

import json
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "inspect.md").read_text()
TABLE = PAGE.partition("## What opens what")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines() if line.startswith("| ")
]
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
PLAIN = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
# What they say of an array, as a program without this library hears it; taught or not.
LOOK = """
import json, os, sys
import tensorstore, xarray, zarr

def tried(function, *arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return f"no: {error}"

def alone(path):
    return str(zarr.open_array(path, mode="r")[...].dtype)

def listed(path):
    return sorted(key for key, _ in zarr.open_group(path, mode="r").arrays())

def opened(path):
    return sorted(xarray.open_zarr(path).load().variables)

def without(path):
    return sorted(xarray.open_zarr(path, drop_variables=["x"]).load().variables)

def stored(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    return str(tensorstore.open(spec).result().read().result().dtype)

def attributes(path):
    return dict(zarr.open_group(path, mode="r").attrs["functional_ckpt"]["values"])

def look(folder):
    return {
        name: [tried(alone, f"{path}/x"), tried(listed, path), tried(opened, path), tried(stored, f"{path}/x"),
               tried(alone, f"{path}/f"), tried(stored, f"{path}/f"), tried(without, path), tried(attributes, path)]
        for name in os.listdir(folder) for path in [f"{folder}/{name}"]
    }

found = [look(sys.argv[1])]
assert "functional_ckpt" not in sys.modules
import functional_ckpt.store.zarr_dtypes
found.append(look(sys.argv[1]))
print(json.dumps(found))
"""


class Custom:
    """A class that is no plain value."""


def held(torch):
    """What checkpoints hold as `x`, by the row of the table."""
    types = {
        name: torch.ones(3).to(getattr(torch, name))
        for name in (*PLAIN, "complex64", "complex128", "bfloat16", *FLOAT8)
    }
    return types | {
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.0), "object": Custom(), "long text": "t" * 70_000,
        "text": "t", "tuple": (1, 2), "number": 1.5,
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each tool said: before and after it was taught our data types."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("xarray")
    import functional_ckpt as fc

    folder = tmp_path_factory.mktemp("held")
    bits = fc.LayoutPolicy(extended_dtypes="bits")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the class that will need trust
        for name, value in held(torch).items():
            policies = {name: fc.LayoutPolicy()} | ({f"{name} bits": bits} if name in ("bfloat16", *FLOAT8) else {})
            for which, layout in policies.items():
                policy = fc.SavePolicy(layout=layout, object_codec="torch", durability="none")
                fc.save({"f": torch.ones(2), "x": value}, folder / which, policy=policy)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, folder], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WIDE = ("bfloat16", *FLOAT8)
#: Row of the table -> the checkpoints it is about, and whether the tools were taught our types.
ABOUT = {
    "`bool`, ints, `float16` to `float64`": (PLAIN, False),
    "`complex64`, `complex128`": (("complex64", "complex128"), False),
    "an array without elements or without dimensions": (("empty", "scalar"), False),
    "`bfloat16`, any float8": (WIDE, False),
    "the same, after `import functional_ckpt.store.zarr_dtypes`": (WIDE, True),
    'the same, saved with `extended_dtypes="bits"`': (tuple(f"{name} bits" for name in WIDE), False),
    "an object, or text of more than 64 KiB": (("object", "long text"), False),
    "text, numbers, tuples and other plain values": (("text", "tuple", "number"), False),
}


def cells(name, said):
    """Return the cells of a row that a checkpoint deserves."""
    array, listing, dataset, element, *_, values = said
    keys = ["f"] if "x" in values else ["f", "x"]

    def cell(found):
        if "x" in values:
            return "in `attrs`"
        if found.startswith("no: "):
            return "no"
        if name.endswith("bits"):
            return "as bits" if found == ("uint16" if name.startswith("bf") else "uint8") else found
        if name in ("object", "long text"):
            return "as bytes" if found == "uint8" else found
        return "yes" if found in (name, "float32") else found

    return [cell(array), *("yes" if found == keys else "no" for found in (listing, dataset)), cell(element)]


def test_every_row_is_run():
    assert [row[0] for row in ROWS[1:]] == list(ABOUT)


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row[0])
def test_cells(row, found):
    names, taught = ABOUT[row[0]]
    for name in names:
        assert cells(name, found[taught][name]) == row[1:], (name, found[taught][name])


def test_arrays_beside_one_that_cannot_be_opened_open_one_by_one(found):
    for name in WIDE:
        array, element, dataset = found[False][name][4:7]
        assert array == element == "float32"
        assert dataset.startswith("no: ")


def test_versions_are_those_that_are_run():
    said = TABLE.partition("Run with ")[2]
    assert said.startswith(
        f"zarr {version('zarr')}, xarray {version('xarray')} and TensorStore {version('tensorstore')} "
    )
