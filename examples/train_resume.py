"""Train a small GPT with FSDP2 on any number of ranks. Killed at any moment and started again, it goes on where it was.

    torchrun --nproc-per-node 2 examples/train_resume.py runs/gpt

Start it again with the same line, or another number of ranks. SIGTERM lets it save the step that it is at, and end.
"""

import argparse
import signal
from datetime import timedelta
from pathlib import Path

import gpt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

import functional_ckpt as fc

BATCH, CONTEXT = 12, 32


class Trainer:
    """A model, its optimizer and schedule, and the text that it learns."""

    def __init__(self, steps):
        self.model = gpt.build("fsdp", seed=0, blocks=2, width=32, head_width=16, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=steps + 1)
        self.tokens = torch.tensor(gpt.read_corpus(Path(__file__).parent)[1])
        self.step = 0

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def set_state(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def train_step(self):
        self.step += 1
        inputs, targets = gpt.batch(self.tokens, self.step, BATCH, CONTEXT)
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        loss = cross_entropy(self.model(inputs[mine]).flatten(0, 1), targets[mine].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=5)
    # In an object store a claim of a killed run may stand for the 60 s of its lease, for which rank 0 waits.
    parser.add_argument("--patience", type=int, default=120, help="seconds that a rank waits for the others")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.patience))
    trainer = Trainer(options.steps)
    keep, policy = fc.KeepLast(2) | fc.KeepBest("loss"), fc.SavePolicy(timeout_s=options.patience)
    with fc.Checkpoints(options.root, keep=keep, policy=policy, on_signal=(signal.SIGTERM,)) as checkpoints:
        trainer.set_state(checkpoints.resume(trainer.state()))
        stop = False
        while trainer.step < options.steps and not stop:
            loss = trainer.train_step()
            if dist.get_rank() == 0:
                print(f"step {trainer.step} loss {loss:.6f}", flush=True)
            stop = checkpoints.should_stop()
            if stop or trainer.step % options.save_every == 0 or trainer.step == options.steps:
                checkpoints.async_save(trainer.step, trainer.state(), metrics={"loss": loss})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
