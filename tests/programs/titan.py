"""What torchtitan's trainer builds around its own CheckpointManager, small.

A model in FSDP2 x TP, optimizers, schedule, data. Only the training loop is ours: every part that has state is
torchtitan's or torch's.
"""

import multiprocessing
import os
import signal
import time

import attrs
import torch
import torch.distributed as dist
import torchtitan.components.checkpointer.dcp as titan
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from tests.mp import launch

#: The modes of torchtitan: in the call, in a thread, in another process.
MODES = ("disabled", "async", "async_with_pinned_mem")
WORDS, WIDTH, HIDDEN = 32, 12, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def model(mesh, seed):
    """Return the model with values made from `seed`, cut as the mesh ("dp", "tp") says."""
    torch.manual_seed(seed)
    whole = Net()
    parallelize_module(whole, mesh["tp"], {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    })  # fmt: skip
    for part in (*whole.blocks, whole):
        fully_shard(part, mesh=mesh["dp"])
    return whole


class Text(IterableDataset):
    """Words without end; a rank's own where it has data of its own."""

    def __init__(self, number):
        self.number, self.place = number, 0

    def __iter__(self):
        while True:
            self.place += 1
            generator = torch.Generator().manual_seed(1000 * self.number + self.place)
            words = torch.randint(WORDS, (5,), generator=generator)
            yield words[:-1], words[1:]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, found):
        self.place = found["place"]


class TrainState:
    """What torchtitan's trainer saves of itself."""

    def __init__(self):
        self.step = self.ntokens_seen = 0

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, found):
        self.step, self.ntokens_seen = found["step"], found["ntokens_seen"]


class Extra:
    """State of the test's: `value` is saved once it is set."""

    value = None

    def state_dict(self):
        return {} if self.value is None else {"value": self.value}

    def load_state_dict(self, found):
        pass


@attrs.define
class Job:
    """A rank's part of a training run; `manager` is torchtitan's."""

    model: nn.Module
    optimizers: OptimizersContainer
    schedulers: LRSchedulersContainer
    data: ParallelAwareDataloader
    state: TrainState
    extra: Extra
    manager: titan.CheckpointManager
    batches: object = None

    @classmethod
    def begun(cls, path, dp, tp, seed=0, **config):
        """Build what a run on `dp` x `tp` ranks has, and load nothing."""
        multiprocessing.current_process()._config["daemon"] = False  # or it may have no children
        mesh = launch.mesh(dp, tp, names=("dp", "tp"))
        net = model(mesh, seed)
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})]
        adam = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[net])
        rates = LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=adam, training_steps=100)
        number = mesh["dp"].get_local_rank()
        data = ParallelAwareDataloader(Text(number), number, dp, batch_size=3)
        state, extra = TrainState(), Extra()
        config = {"enable": True, "interval": 50, "async_mode": "disabled", "last_save_model_only": False, **config}
        manager = titan.CheckpointManager.Config(**config).build(
            dataloader=data, model_parts=[net], optimizers=adam, lr_schedulers=rates,
            states={"train_state": state, "extra": extra}, sd_adapter=None, base_folder=str(path),
        )  # fmt: skip
        if manager.async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM and not torch.accelerator.is_available():
            # What torchtitan asks for itself needs a GPU: pinned memory, and copies that do not block.
            manager.stager = DefaultStager(StagingOptions(False, True, True, False))
        return cls(net, adam, rates, data, state, extra, manager)

    def train(self, to_step):
        """Take two steps, call them `to_step`, and return the losses."""
        self.batches = iter(self.data) if self.batches is None else self.batches
        losses = []
        for _ in range(2):
            words, wanted = next(self.batches)
            self.optimizers.zero_grad()
            loss = nn.functional.cross_entropy(self.model(words).flatten(0, 1), wanted.flatten())
            loss.backward()
            self.manager.maybe_wait_for_staging()  # as torchtitan's trainer, before what is saved changes
            self.optimizers.step()
            self.schedulers.step()
            self.state.ntokens_seen += words.numel()
            losses.append(float(loss.detach()))
        self.state.step = to_step
        return losses

    def save(self, step, last=False):
        """Save as torchtitan's trainer does after each step."""
        self.manager.save(step, last_step=last)

    def run(self, *steps):
        """Train to each step and save; wait for the last one. Returns the losses."""
        losses = []
        for step in steps:
            losses.append(self.train(step))
            self.save(step)
        self.manager.maybe_wait_for_saving()
        return losses

    def arm(self, act, *arguments):
        """Have `act` called in the middle of this rank's part of the next save, wherever torchtitan saves."""
        if self.manager.async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.extra.value = Made(arm, act, *arguments)
        else:
            arm(act, *arguments)

    def spoil(self, cause, path):
        """Have this rank's part of the next save fail: for a value, or for a file where a directory should be."""
        if cause == "file":
            path.write_text("no directory")
        elif cause == "meta":
            self.extra.value = torch.ones(3, device="meta")
        else:
            is_elsewhere = self.manager.async_mode == titan.AsyncMode.ASYNC_WITH_PINNED_MEM
            self.extra.value = Made(refused) if is_elsewhere else refused()

    def whole(self):
        """Return all there is: model, optimizers, schedule, numbers, each tensor whole. All ranks call it."""
        found = {**self.optimizers.state_dict(), **self.model.state_dict()}
        found |= {"rate": self.schedulers.state_dict(), "state": self.state.state_dict()}
        found = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}
        return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}

    def close(self):
        """Wait until torchtitan has removed what it wants to."""
        self.manager.maybe_wait_for_saving()
        dist.barrier()  # rank 0 removes
        self.manager.close()
        dist.barrier()


def same(found, expected):
    """Fail unless two results of `Job.whole` are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            launch.same(found[key], value, key)
        else:
            assert found[key] == value, key


def listed(path):
    """Return what stands in torchtitan's folder."""
    return sorted(os.listdir(path / "checkpoint"))


class Made:
    """A value to save that another process makes itself, as it unpickles it: what `make` does, is done there."""

    def __init__(self, make, *arguments):
        self.make, self.arguments = make, arguments

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return self.make, self.arguments


def refused():
    """Return a value that no save can write."""
    return lambda: None


def arm(act, *arguments):
    """Call `act` once, in the middle of the next save of this process: some of its files are written by then."""
    from torch.distributed.checkpoint import filesystem

    from functional_ckpt.store.files import FileStore

    for owner, name in ((FileStore, "create"), (filesystem, "_write_item")):
        _interrupt(owner, name, act, arguments)


def _interrupt(owner, name, act, arguments):
    was, left = getattr(owner, name), [3]

    def interrupted(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            setattr(owner, name, was)
            act(*arguments)
        return was(*args, **options)

    setattr(owner, name, interrupted)


def die(folder, *ranks):
    """Kill the processes of ranks, and this one, which may be one that a rank has started."""
    (folder / "killed").touch()
    for number in (*ranks, os.getpid()):
        os.kill(number, signal.SIGKILL)


def hold(folder):
    """Say that a save is under way, and keep it so until the test lets it go."""
    (folder / "held").touch()
    wait_for(folder / "go")


def wait_for(path, limit_s=launch.LIMIT_S / 2):
    """Wait until a file is there."""
    ends = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < ends, f"no {path}"
        time.sleep(0.02)
