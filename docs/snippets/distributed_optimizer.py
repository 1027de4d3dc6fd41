from functional_ckpt.torch.megatron.distributed_optimizer import load_optimizer_state, sharded_optimizer_state
from functional_ckpt.torch.megatron.serialization import load, save


def state_of(ddp, optimizer):
    model = ddp.module.sharded_state_dict()
    return {"model": model, "optimizer": sharded_optimizer_state(optimizer, model)}


def save_training(ddp, optimizer, step, path):
    save({**state_of(ddp, optimizer), "step": step}, path)


def load_training(ddp, optimizer, path):
    found = load(state_of(ddp, optimizer), path)
    ddp.module.load_state_dict(found["model"])
    load_optimizer_state(optimizer, found["optimizer"])
    return found["step"]
