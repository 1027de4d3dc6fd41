"""Doing it: bytes of keys, values and arrays; stores; the executor; commit. The only layer that touches storage."""
