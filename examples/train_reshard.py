"""Train a small GPT on 4 ranks, save it in mid-training, resume on 2 ranks and on 1: same losses.

    python examples/train_reshard.py             # a few minutes on two cores
    python examples/train_reshard.py --small     # under a minute: same code, smaller model
    python examples/train_reshard.py --keep DIR  # leave the checkpoint in DIR to look at

What happens, in order:

1. **4 ranks, FSDP2.** A byte-level GPT learns this project's own sources and docs. Half-way it is
   saved with one call, `functional_ckpt.save`, and goes on: that is the uninterrupted run.
2. **2 ranks, tensor parallelism.** New processes build the model from another seed, cut along other
   axes, fill it with `functional_ckpt.load`, and train the second half.
3. **1 process, plain tensors.** The same again without any torch.distributed.
4. **zarr-python** opens the checkpoint: it is an ordinary Zarr v3 group.

Steps 2 and 3 check two things and exit with an error when either fails: right after loading, every
parameter, every optimizer tensor and every scheduler value equals the saved one bit by bit; and the
losses of the second half equal those of step 1 up to the order of floating-point additions, which
is all that a layout changes.

The part to copy into a training script is short: `training_state`, and the lines of `train` and
`resume` that call `functional_ckpt`. The model and its layouts are in `gpt.py`, the checks and what
is printed in `report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpt
import report
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import functional_ckpt as fc

SMALL = {"blocks": 2, "width": 64, "head_width": 16, "context": 64, "batch": 8, "save_at": 50}
FULL = {"blocks": 4, "width": 128, "head_width": 32, "context": 128, "batch": 16, "save_at": 120}
RUNS = {  # layout: (ranks, what to call it)
    "fsdp": (4, "4 ranks, FSDP2"),
    "tensor": (2, "2 ranks, tensor parallel"),
    "plain": (1, "1 process, plain tensors"),
}
FOLLOWED = "blocks.0.down.weight"
"""The parameter whose journey the output tells: cut by rows, then by columns, then not at all."""


# ---- One training process ---------------------------------------------------------------------


class Trainer:
    """A model under one layout, with optimizer, schedule and data, as any training script has."""

    def __init__(self, layout: str, folder: Path, seed: int) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.batch_size, self.save_at = config.pop("batch"), config.pop("save_at")
        self.context, self.steps, self.layout = config["context"], 2 * self.save_at, layout
        self.tokens = torch.tensor(json.loads((folder / "corpus.json").read_text()))
        self.model = gpt.build(layout, seed, **config)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=6e-3)
        warmup = LinearLR(self.optimizer, start_factor=0.1, total_iters=5)
        decay = CosineAnnealingLR(self.optimizer, T_max=self.steps)
        self.scheduler = SequentialLR(self.optimizer, [warmup, decay], milestones=[5])
        self.step = 0

    def train_until(self, last: int) -> list[float]:
        """Train up to and including step ``last``; give the global loss of each step."""
        losses = []
        while self.step < last:
            self.step += 1
            losses.append(self._train_step())
        return losses

    def _train_step(self) -> float:
        inputs, targets = gpt.batch(self.tokens, self.step, self.batch_size, self.context)
        if self.layout == "fsdp":  # data parallel: a slice of the batch for each rank
            mine = slice(dist.get_rank(), None, dist.get_world_size())
            inputs, targets = inputs[mine], targets[mine]
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        shown = loss.detach().clone()
        if self.layout == "fsdp":
            dist.all_reduce(shown)
            shown /= dist.get_world_size()
        return shown.item()


def training_state(trainer: Trainer) -> dict[str, Any]:
    """Everything a later run needs, as one nested dict: what is saved, and what is loaded into.

    `get_state_dict` keys the optimizer's state by parameter name, so it means the same under every
    layout. `PerRank` marks the one value that legitimately differs from rank to rank.
    """
    model, optim = get_state_dict(trainer.model, trainer.optimizer)
    return {
        "model": model,
        "optim": optim,
        "scheduler": trainer.scheduler.state_dict(),
        "step": trainer.step,
        "rng": fc.PerRank(torch.get_rng_state()),
    }


def train(folder: Path) -> None:
    """Train on all ranks, save half-way, go on: the uninterrupted run."""
    trainer = Trainer("fsdp", folder, seed=0)
    report.say(f"model: {sum(p.numel() for p in trainer.model.parameters()):,} parameters")
    report.say_placement(FOLLOWED, trainer.model.get_parameter(FOLLOWED))
    losses = trainer.train_until(trainer.save_at)
    report.say(f"trained {trainer.step} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}")

    state = training_state(trainer)
    prints = report.fingerprints(state)
    notes = {"trained_under": RUNS["fsdp"][1], "step": trainer.step}
    started = time.perf_counter()
    fc.save(state, folder / "checkpoint", overwrite=True, attributes=notes)
    seconds = time.perf_counter() - started
    report.say(f"saved {len(prints)} tensors and values in {seconds:.2f} s, then went on training")

    losses += trainer.train_until(trainer.steps)
    report.say(f"trained {trainer.steps - trainer.save_at} more: loss -> {losses[-1]:.4f}")
    write_json(folder / "fingerprints.json", prints)
    write_json(folder / "losses-fsdp.json", losses)


def resume(layout: str, folder: Path) -> None:
    """Load the checkpoint under another layout, check it bit by bit, train the second half."""
    trainer = Trainer(layout, folder, seed=1)  # another seed: nothing is right before the load
    report.say_placement(FOLLOWED, trainer.model.get_parameter(FOLLOWED))
    state = training_state(trainer)
    started = time.perf_counter()
    state = fc.load(state, folder / "checkpoint", policy=fc.LoadPolicy(per_rank="first"))
    seconds = time.perf_counter() - started
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    trainer.scheduler.load_state_dict(state["scheduler"])
    trainer.step = state["step"]
    torch.set_rng_state(state["rng"].value)

    report.say(f"loaded in {seconds:.2f} s, back at step {trainer.step}")
    saved = json.loads((folder / "fingerprints.json").read_text())
    report.check_bit_equal(saved, report.fingerprints(training_state(trainer)))
    losses = trainer.train_until(trainer.steps)
    report.say(f"trained {trainer.steps - trainer.save_at} more: loss -> {losses[-1]:.4f}")
    write_json(folder / f"losses-{layout}.json", losses)


def write_json(path: Path, value: Any) -> None:
    """Write ``value``, from rank 0 only."""
    if report.is_first_rank():
        path.write_text(json.dumps(value))


# ---- Starting it all ----------------------------------------------------------------------------


def launch(layout: str, folder: Path) -> None:
    """Run one layout in fresh processes: through torchrun, or alone when it is one process."""
    ranks, _ = RUNS[layout]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    start = [*torchrun, f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *start, __file__, "run", layout, str(folder)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if done.returncode:
        raise SystemExit(f"{RUNS[layout][1]}: failed with exit status {done.returncode}")


def run(layout: str, folder: Path) -> None:
    """Be one process of one layout: what `launch` starts."""
    distributed = RUNS[layout][0] > 1
    if distributed:
        dist.init_process_group("gloo")
    if layout == "fsdp":
        train(folder)
    else:
        resume(layout, folder)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        # Gloo's threads outlive the group, and may still be freeing the last tensors: if Python
        # shut down meanwhile, they would abort the process.
        os._exit(0)


def main(sizes: dict[str, int], folder: Path) -> None:
    """Train, resume twice, show."""
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[1]
    paths, tokens = gpt.read_corpus(root)
    # One copy for all runs, so that editing a source meanwhile changes nothing.
    write_json(folder / "corpus.json", tokens)
    write_json(folder / "config.json", sizes)
    print(f"text: {len(tokens):,} bytes in {len(paths)} .py and .md files of {root.name}/")
    for number, (layout, (_, title)) in enumerate(RUNS.items(), 1):
        print(f"\n[{number}/4] {title}", flush=True)
        launch(layout, folder)
    first, *others = (json.loads((folder / f"losses-{x}.json").read_text()) for x in RUNS)
    _, *titles = (title for _, title in RUNS.values())
    start = sizes["save_at"]
    report.check_losses(first[start:], dict(zip(titles, others, strict=True)), start)
    print("\n[4/4] the checkpoint, seen by zarr-python")
    report.show_checkpoint(folder / "checkpoint", f"model.{FOLLOWED}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(sys.argv[2], Path(sys.argv[3]))
        sys.exit()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the checkpoint here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        main(SMALL if options.small else FULL, options.keep or Path(scratch))
