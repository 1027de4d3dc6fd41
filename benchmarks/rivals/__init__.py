"""Libraries that are compared where they are installed: a module each, imported by `benchmarks.lineup` only.

A module has ``COMPETITORS``, and says in its docstring which choices were made to be fair to the library.
"""
