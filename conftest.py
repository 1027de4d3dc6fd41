"""Modules that need what is not installed are left out when doctests are collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("megatron") else ["functional_ckpt/torch/megatron/plugin.py"]
