from megatron.training.checkpointing import save_checkpoint

from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

context = {"save_strategy": ZarrSaveStrategy()}  # one for all saves


def save(iteration, model, optimizer, scheduler, flops=0):
    save_checkpoint(iteration, model, optimizer, scheduler, flops, checkpointing_context=context)
