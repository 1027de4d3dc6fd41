"""The identity of this machine."""

from functools import cache

__all__ = ["boot_id"]


@cache
def boot_id() -> str:
    """Return the kernel's boot id, which all containers of this machine share, or "" if it cannot be read.

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
