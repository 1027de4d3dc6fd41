"""How sharded state dicts are saved and loaded, by the names of ``megatron.core.dist_checkpointing.strategies``."""
