"""What this machine is called by its kernel."""

from functools import cache

__all__ = ["boot_id"]


@cache
def boot_id() -> str:
    """Return what all containers of this machine and no other machine have in common, or "" if it cannot be known.

    Examples
    --------
    >>> boot_id() == boot_id()
    True
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
