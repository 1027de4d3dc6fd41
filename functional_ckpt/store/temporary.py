r"""Names of temporary files and directories, which exist while a save runs, or after it was killed.

Programs find checkpoints by patterns that match anywhere in a name, such as ``step-(\d+)``, and delete all but the
newest. So these names contain neither the name of the checkpoint nor a digit.
"""

import re
import secrets

import xxhash

__all__ = ["claim_name", "claims_for", "is_claim_name", "new_save_id", "part_of", "working_name"]

_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_ID = "[a-p]{16}"
_BESIDE = re.compile(rf"(?P<save>\.{_ID}\.{_ID})\.(saving|claim|claim\.new)")
_WITHIN = re.compile(rf"\.{_ID}\.claim(\.new|\.abandoned)?")


def new_save_id() -> str:
    """Return the unique id of a save: 64 random bits, as letters."""
    return secrets.token_hex(8).translate(_LETTERS)


def _beside(name: str, save_id: str) -> str:
    digest = xxhash.xxh3_64_hexdigest(name.encode("utf-8", "surrogateescape"))
    return f".{digest.translate(_LETTERS)}.{save_id}"


def working_name(name: str, save_id: str) -> str:
    """Return the name of the directory, beside the checkpoint `name`, that a save writes to.

    Examples
    --------
    >>> working_name("step-400", "ponmlkjihgfedcba")
    '.jomodfpppeacpbmd.ponmlkjihgfedcba.saving'
    """
    return f"{_beside(name, save_id)}.saving"


def claim_name(save_id: str, name: str | None = None) -> str:
    """Return the name of a save's claim: beside the checkpoint `name`, or within the directory that it is saved in.

    Examples
    --------
    >>> claim_name("ponmlkjihgfedcba")
    '.ponmlkjihgfedcba.claim'
    """
    return f".{save_id}.claim" if name is None else f"{_beside(name, save_id)}.claim"


def claims_for(name: str, found: list[str]) -> tuple[str, ...]:
    """Return the ids of the saves to the checkpoint `name` whose claims are among the names `found`, sorted.

    Examples
    --------
    >>> claims_for("a", [claim_name("ponmlkjihgfedcba", "a"), claim_name("abcdefghijklmnop", "b")])
    ('ponmlkjihgfedcba',)
    """
    claims = re.compile(re.escape(_beside(name, "")) + rf"({_ID})\.claim")
    return tuple(sorted(match[1] for match in map(claims.fullmatch, found) if match is not None))


def part_of(name: str) -> str | None:
    """Return the name of the claim to which a temporary file of this name belongs; None if no save gives such a name.

    Examples
    --------
    >>> part_of(working_name("a", "ponmlkjihgfedcba")) == claim_name("ponmlkjihgfedcba", "a")
    True
    """
    match = _BESIDE.fullmatch(name)
    return None if match is None else f"{match['save']}.claim"


def is_claim_name(name: str) -> bool:
    """Tell whether a file has the name of a claim of a save in marker mode.

    Examples
    --------
    >>> is_claim_name(".abcdefghijklmnop.claim"), is_claim_name("a.claim")
    (True, False)
    """
    return _WITHIN.fullmatch(name) is not None
