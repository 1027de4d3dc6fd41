"""What the tests of programs share: the storage that DCP uses, ranks as `torchrun` makes them, a rank that dies."""

import contextlib
import os
import signal

from tests import pages
from tests.effects import EFFECTS, watched
from tests.mp.launch import Ranks, rank

#: DCP's own storage shows that a test asks nothing of ours that a program does not.
STORAGES = ("stock", "ours")
#: Programs are slow to import.
LIMIT_S = 240


@contextlib.contextmanager
def storing(storage):
    """Let DCP use this storage where a program does not choose one."""
    if storage == "stock":
        yield
    else:
        import functional_ckpt.torch

        with functional_ckpt.torch.install():
            yield


def as_torchrun(size):
    """Set the variables that `torchrun` sets; the process group is there already."""
    number = str(rank())
    os.environ.update(
        RANK=number, LOCAL_RANK=number, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0",
        GROUP_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip


@contextlib.contextmanager
def pool(size):
    """Ranks of their own: after a death, a new job starts them all."""
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def whole(state):
    """Return a tree with every DTensor as the whole tensor."""
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.full_tensor().cpu() if isinstance(leaf, DTensor) else leaf, state)


class Death:
    """Kills this process within save number `save`, once it has done `share` of what an earlier save did to files."""

    def __init__(self, folder, save, share):
        self.folder, self.save, self.share = folder, save, share
        self.saves = self.effects = self.count = 0

    @contextlib.contextmanager
    def saving(self):
        """Count what the block does to files, or die in it."""
        self.saves, self.effects, self.count = self.saves + 1, self.count, 0
        with watched(self.folder, self._handle):
            yield

    def _handle(self, call):
        if call.name in EFFECTS:
            self.count += 1
        if self.saves == self.save and self.count > self.share * self.effects:
            os.kill(os.getpid(), signal.SIGKILL)
        return call.do()


@contextlib.contextmanager
def doomed(death, owner, name):
    """Have `owner.name`, which saves, counted by `death`; None leaves it as it is."""
    method = getattr(owner, name)

    def counted(*arguments, **options):
        with death.saving():
            return method(*arguments, **options)

    if death is not None:
        setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, method)


def accelerate_on_cpu():
    """Let Accelerate shard on CPU ranks as it does on GPUs: it refuses nothing, but takes FSDP for GPUs' alone.

    Nothing else of it is changed. Its states are singletons: they are forgotten, as in a process that begins.
    """
    from accelerate import state
    from accelerate.utils import DistributedType

    begin = state.PartialState.__init__

    def begun(self, *arguments, **options):
        begin(self, *arguments, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    state.AcceleratorState._reset_state(reset_partial_state=True)
    if begin.__name__ != begun.__name__:
        state.PartialState.__init__ = begun


def shown(name, folder, **given):
    """Run a program of docs/programs.md in a folder, with what it takes for granted; return its names.

    It installs our storage for good, so its ranks are for it alone.
    """
    os.chdir(folder)
    return pages.shown("programs.md", name, **given)
