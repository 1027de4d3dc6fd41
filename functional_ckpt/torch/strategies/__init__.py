"""The documented names of `functional_ckpt.torch.megatron.strategies`, by a shorter path."""
