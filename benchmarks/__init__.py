"""Ratios of `functional_ckpt` to raw files, DCP and safetensors: ``python -m benchmarks``."""
