"""A tiny real GPT under Megatron's DDP and DistributedOptimizer, any layout of four ranks, trained by its schedules.

Sizes are odd on purpose: no bucket is full, cuts between data parallel ranks fall inside rows of parameters.
"""

import torch
import torch.distributed as dist

VOCABULARY, LENGTH, BATCH = 66, 8, 4
BUCKET = 700


def gpt(tp, pp, dtype=torch.float32, ep=1, experts=None, distributed=True, **sizes):
    """Return this rank's part of the model below DDP, and its optimizer; `experts` are dealt to `ep` ranks.

    `distributed` says of what kind the optimizer is.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    torch.manual_seed(10 * tp + pp)
    sizes = {"num_layers": 4, "hidden_size": 12, "vocabulary": VOCABULARY, "bucket": BUCKET, **sizes}
    moe = {
        "num_moe_experts": experts, "moe_router_topk": 2, "expert_model_parallel_size": ep, "add_bias_linear": False,
    } if experts else {}  # fmt: skip
    config = TransformerConfig(
        **moe,
        num_layers=sizes["num_layers"], hidden_size=sizes["hidden_size"], num_attention_heads=4,
        gated_linear_unit=True, use_cpu_initialization=True, params_dtype=dtype, pipeline_dtype=dtype,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, attention_dropout=0.0, hidden_dropout=0.0,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=experts), sizes["vocabulary"], LENGTH,
        share_embeddings_and_output_weights=True,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    ).to(dtype)  # fmt: skip
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=True, bucket_size=sizes["bucket"],
        grad_reduce_in_fp32=True,
    )  # fmt: skip
    ddp = DistributedDataParallel(config, buckets, model)
    adam = OptimizerConfig(
        optimizer="adam", lr=0.01, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=distributed,
        params_dtype=dtype, bf16=dtype is torch.bfloat16,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(adam, [ddp])


def train(ddp, optimizer, steps):
    """Return the losses, over the global batch, of some steps on tokens that are always the same."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    size, mine = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batch = (torch.arange(BATCH * (LENGTH + 1)).reshape(BATCH, -1) * 7 % VOCABULARY).chunk(size)[mine]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]

    def forward(sequences, model):
        tokens = next(sequences)[None]
        found = model(tokens[:, :-1], torch.arange(LENGTH)[None], mask, labels=tokens[:, 1:])
        return found, lambda each: (each.float().mean(), {"loss": each.float().mean().detach()})

    losses = []
    for _ in range(steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(batch), model=[ddp], num_microbatches=len(batch),
            seq_length=LENGTH, micro_batch_size=1, decoder_seq_length=LENGTH, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        # Only the last stage has losses; its tensor parallel ranks have the same ones.
        mean = sum((each["loss"] for each in found), torch.zeros(())) / BATCH
        mean *= parallel_state.get_tensor_model_parallel_rank() == 0
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses
