"""Strategies that save and load state dicts, by the names of ``megatron.core.dist_checkpointing.strategies``."""
