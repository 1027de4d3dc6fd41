"""A save whose system calls are refused one after the other, and the promises that it has to keep."""

import errno
import traceback
import warnings

from functional_ckpt import async_save, errors, save
from functional_ckpt.testing.simulate import try_ranks
from tests.effects import Refusal, watched
from tests.places import check_place, check_recovery, everything, make_place, run_save, whole


def save_by_two(*arguments, **options):
    """Save from two ranks that hold the same, each of which writes some; they fail together, if they fail."""
    outcomes = try_ranks(2, lambda gather: save(*arguments, process_group=gather, **options))
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert len(failed) in (0, 2), outcomes
    assert all(isinstance(error, errors.CheckpointError) for error in failed), outcomes
    if failed:
        raise failed[0]


#: How a call is refused -> the error. Where all that follow are refused too, the disk has failed or is full.
HOWS = {"once": errno.EIO, "onwards": errno.ENOSPC, "after": errno.EIO}
#: What no save goes on without; other calls look around or clean up, and one that follows may tell better.
TOLD = ("create", "write", "ftruncate", "fsync", "syncfs", "mkdir", "link", "listdir", "flock")
CASES = {
    "rename": ("rename", "fsync", save),
    "overwrite": ("overwrite", "syncfs", save),
    "marker": ("marker", "fsync", save),
    "keep": ("keep", "fsync", save),
    "marker syncfs": ("marker", "syncfs", save),
    "async": ("overwrite", "fsync", lambda *arguments, **options: async_save(*arguments, **options).result(60)),
    "two ranks": ("overwrite", "fsync", save_by_two),
    "two ranks marker": ("marker", "syncfs", save_by_two),
}


def try_each(root, case, how, first=0, step=1):
    """Refuse calls number `first`, `first + step`, ... until the save makes no more; return how many it makes."""
    for at in range(first, 10**6, step):
        refusal = Refusal(at, how, HOWS[how])
        try_one(root / f"{at}", case, refusal)
        if refusal.refused is None:
            return refusal.count
    raise AssertionError("the save does not end")


def notes_of(error):
    """What is noted with an error, and with what caused it."""
    found = []
    while error is not None:
        found += getattr(error, "__notes__", [])
        error = error.__cause__ or error.__context__
    return found


def how_left(refusal):
    # The second name of a published root is no harm either.
    return refusal.how == "after" or "zarr.json.new" in (refusal.refused or "")


def try_one(place, case, refusal):
    mode, durability, start = CASES[case]
    make_place(place, mode)
    before = check_place(place, mode)
    said, failed, told = [], "", ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with watched(place, refusal):
                run_save(place, mode, durability, start)
        except errors.CheckpointError as error:  # and nothing else
            failed = "".join(traceback.format_exception(error))
            told, said = str(error), notes_of(error)
    said += [str(warning.message) for warning in caught]
    first = (refusal.refused or "none").split()[0]
    assert not failed or f"refused {first}" in told or first not in TOLD, (failed, refusal.refused)
    about = (case, refusal.at, refusal.how, refusal.refused, failed, said)
    assert all("refused" in text for text in said), about
    # The caller is told truly which checkpoint is there.
    assert check_place(place, mode) == (before if failed else 2), about
    # Nothing is left without a word, but what a call has made that was said to have failed: `sweep` finds it.
    assert said or how_left(refusal) or everything(place) == whole(place, mode), about
    assert check_recovery(place, mode) == (before if failed else 2), about
