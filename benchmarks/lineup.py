"""All competitors of this machine: those of `benchmarks.competitors`, and the rivals that are installed."""

import gc
import importlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import attrs

from benchmarks.competitors import COMPETITORS, Competitor

_BASE = ("functional_ckpt", "torch", "numpy", "tensorstore")


@attrs.frozen
class Rival:
    """A library that may be missing: the module that measures it, its name for pip, and the names of its rows."""

    distribution: str
    module: str
    names: tuple[str, ...]

    @property
    def version(self) -> str | None:
        return _version(self.distribution)

    def competitors(self) -> tuple[Competitor, ...]:
        """Import the library; raises ImportError or AttributeError if this version of it does not fit."""
        return importlib.import_module(f"benchmarks.rivals.{self.module}").COMPETITORS


RIVALS = (
    Rival("safetensors", "safetensors_file", ("safetensors",)),
    Rival("orbax-checkpoint", "orbax_tree", ("Orbax",)),
    Rival("megatron-core", "megatron_torch_dist", ("megatron torch_dist",)),
    Rival(
        "torch_checkpointing",
        "torch_checkpointing_pt",
        ("torch_checkpointing", "torch_checkpointing, resharder"),
    ),
)


@attrs.frozen
class Lineup:
    """Who takes part, and the lines that say so: versions, and who was left out."""

    competitors: tuple[Competitor, ...]
    remarks: tuple[str, ...]


def assemble() -> Lineup:
    """Import every rival that is installed."""
    found = list(COMPETITORS)
    versions = [f"{name}=={_version(name)}" for name in _BASE]
    skipped = []
    for rival in RIVALS:
        if rival.version is None:
            skipped.append(f"{rival.distribution} is not installed: skipped (pip install {rival.distribution})")
            continue
        try:
            found += rival.competitors()
        except (ImportError, AttributeError) as error:
            skipped.append(f"{rival.distribution} {rival.version} does not fit: skipped ({error})")
        else:
            versions.append(f"{rival.distribution}=={rival.version}")
    # Hundreds of thousands of objects came with the imports; collecting them again and again is nobody's time.
    gc.collect()
    gc.freeze()
    return Lineup(tuple(found), (", ".join(versions), *skipped))


def find(name: str) -> Competitor:
    """Return the competitor `name`, importing no other rival.

    Raises
    ------
    KeyError
        If there is none.
    """
    return next(one for one in _candidates(name) if one.name == name)


def _candidates(name: str) -> Iterator[Competitor]:
    yield from COMPETITORS
    for rival in RIVALS:
        if name in rival.names:
            yield from rival.competitors()
    raise KeyError(name)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
