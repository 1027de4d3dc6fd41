"""Lightning's own Trainer on CPU ranks: FSDP2 and tensor parallel, `save_last`, saving a path again, death, resumption.

Nothing of Lightning is patched: its ModelParallelStrategy runs over gloo.
"""

import os
from pathlib import Path

import pytest

import functional_ckpt
from tests.programs.setting import LIMIT_S, STORAGES, Death, as_torchrun, doomed, pool, shown, storing, whole

pytestmark = pytest.mark.mp


def net(logs=False):
    """Return a module cut as its mesh says, if it has one."""
    import lightning
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
            self.register_buffer("scale", torch.tensor(0.5))

        def configure_model(self):
            if self.device_mesh is None or isinstance(self.model[0].weight, DTensor):
                return
            rows, columns = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
            if columns.size() > 1:
                parallelize_module(self.model, columns, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if rows.size() > 1:
                for part in (self.model[0], self.model[2], self.model):
                    fully_shard(part, mesh=rows)

        def training_step(self, batch, _index):
            loss = torch.nn.functional.mse_loss(self.scale * self.model(batch[0]), batch[1])
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            adam = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [adam], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)]

    return Net()


def batches():
    """Return a loader of one batch, the same whatever the ranks: an epoch is a step."""
    import torch

    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def fit(storage, folder, shape, to_step, resume=None, death=None, **keeping):
    """Train `to_step` steps on a mesh of this shape, saving after each; return what a resumed run must equal."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    size = shape[0] * shape[1]
    as_torchrun(size)
    keeping = {"save_last": True, "save_top_k": 1, "filename": "{step}", **keeping}
    keeper = ModelCheckpoint(folder, **keeping)
    strategy = ModelParallelStrategy(*shape)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=to_step, callbacks=[keeper], logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    module = net()
    with storing(storage), doomed(death, strategy, "save_checkpoint"):
        trainer.fit(module, batches(), ckpt_path=resume)
    return state_of(trainer, module)


def state_of(trainer, module):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    (adam,) = trainer.optimizers
    return {
        "step": trainer.global_step,
        "model": whole(get_model_state_dict(module)),
        "optimizer": whole(get_optimizer_state_dict(module, adam)),
        "rate": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def check_ours(path, state, same):
    """Fail unless the checkpoint is whole, opens by our own functions, and holds Lightning's file beside."""
    assert functional_ckpt.verify(path).ok
    assert (path / "meta.pt").is_file()
    found = functional_ckpt.open_checkpoint(path).state("torch")
    same(dict(found["state_dict"]), dict(state["model"]))
    same(found["optimizer_0"]["state"], state["optimizer"]["state"])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=["fsdp", "tp", "fsdp-tp"])
def test_a_run_that_goes_on_equals_one_that_never_stopped(two, four, shape, storage, tmp_path, same):
    """`last.ckpt` is saved again at every step, and the one before it is removed."""
    ranks = four if shape == (2, 2) else two
    unbroken = ranks.run(fit, storage, tmp_path / "unbroken", shape, 4, limit_s=LIMIT_S)
    ranks.run(fit, storage, tmp_path / "run", shape, 2, limit_s=LIMIT_S)
    assert names(tmp_path / "run") == ["last.ckpt", "step=2.ckpt"]
    resumed = ranks.run(fit, storage, tmp_path / "run", shape, 4, "last", limit_s=LIMIT_S)
    same(resumed, unbroken)
    assert names(tmp_path / "run") == ["last.ckpt", "step=4.ckpt"]
    if storage == "ours":
        for name in names(tmp_path / "run"):
            check_ours(tmp_path / "run" / name, resumed[0], same)


@pytest.mark.parametrize("storage", STORAGES)
def test_another_mesh_takes_up(two, four, storage, tmp_path, same):
    """Nothing is trained after the load: four ranks of FSDP2 x TP, then two of FSDP2, then four again."""
    saved = four.run(fit, storage, tmp_path / "a", (2, 2), 2, limit_s=LIMIT_S)[0]
    last = tmp_path / "a" / "last.ckpt"
    narrower = two.run(fit, storage, tmp_path / "b", (2, 1), 2, last, limit_s=LIMIT_S)[0]
    same(narrower, saved)
    two.run(fit, storage, tmp_path / "b", (2, 1), 3, last, limit_s=LIMIT_S)
    wider = four.run(fit, storage, tmp_path / "c", (1, 4), 3, tmp_path / "b" / "last.ckpt", limit_s=LIMIT_S)[0]
    assert wider["step"] == 3


@pytest.mark.parametrize("storage", STORAGES)
def test_last_may_be_a_link(two, storage, tmp_path, same):
    unbroken = two.run(fit, storage, tmp_path / "unbroken", (2, 1), 3, limit_s=LIMIT_S)
    two.run(fit_linking, storage, tmp_path / "run", 2, None, limit_s=LIMIT_S)
    assert (tmp_path / "run" / "last.ckpt").is_symlink()
    same(two.run(fit_linking, storage, tmp_path / "run", 3, "last", limit_s=LIMIT_S), unbroken)


def fit_linking(storage, folder, to_step, resume):
    return fit(storage, folder, (2, 1), to_step, resume, save_last="link")


@pytest.fixture(scope="module")
def unbroken(two, four, tmp_path_factory):
    """What runs of four steps end with, by the shape of their mesh."""
    folder = tmp_path_factory.mktemp("unbroken")
    pools = {(2, 1): two, (2, 2): four}
    return {shape: ranks.run(fit, "stock", folder, shape, 4, limit_s=LIMIT_S) for shape, ranks in pools.items()}


DEATHS = [
    (shape, rank, share) for shape, rank in (((2, 1), 0), ((2, 1), 1), ((2, 2), 3)) for share in (0.05, 0.5, 0.95)
]


@pytest.mark.parametrize(("shape", "rank", "share"), DEATHS)
def test_after_a_death_the_newest_whole_checkpoint_goes_on(two, four, unbroken, shape, rank, share, tmp_path, same):
    """Killed while `last.ckpt` is saved again at step 3: it holds step 2, or 3 if that was late."""
    size = shape[0] * shape[1]
    with pool(size) as ranks:
        outcomes = ranks.outcomes(fit_until_death, tmp_path, shape, rank, share, limit_s=LIMIT_S)
    assert outcomes[rank].dead
    assert all(outcome.error is not None for outcome in outcomes if not outcome.dead)
    again = {2: two, 4: four}[size].run(fit, "ours", tmp_path, shape, 4, "last", limit_s=LIMIT_S)
    same(again, unbroken[shape])
    functional_ckpt.sweep(tmp_path)
    assert names(tmp_path)[:1] == ["last.ckpt"]
    assert all(functional_ckpt.verify(tmp_path / name).ok for name in names(tmp_path))


def fit_until_death(folder, shape, rank, share):
    """Two saves a step: the sixth is that of `last.ckpt` at step 3."""
    mine = int(os.environ["TEST_RANK"]) == rank
    return fit("ours", folder, shape, 4, death=Death(folder, 6, share) if mine else None)


def test_a_death_in_a_first_save_leaves_the_checkpoints_before_it(two, unbroken, tmp_path, same):
    """Lightning makes the directory itself and leaves it empty; it then saves under another name beside it."""
    with pool(2) as ranks:
        outcomes = ranks.outcomes(fit_all_until_death, tmp_path, limit_s=LIMIT_S)
    assert outcomes[1].dead
    assert outcomes[0].error is not None
    assert not (tmp_path / "step=3.ckpt" / "meta.pt").exists()
    newest = max((path for path in tmp_path.glob("*.ckpt") if (path / "meta.pt").is_file()), key=os.path.getmtime)
    assert newest.name == "step=2.ckpt"
    same(two.run(fit_all, tmp_path, 4, newest, limit_s=LIMIT_S), unbroken[2, 1])
    functional_ckpt.sweep(tmp_path)
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt", "step=3-v1.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert not names(tmp_path / "step=3.ckpt")


def fit_all(folder, to_step, resume=None, death=None):
    return fit("ours", folder, (2, 1), to_step, resume, death, save_last=False, save_top_k=-1)


def fit_all_until_death(folder):
    return fit_all(folder, 4, death=Death(folder, 3, 0.5) if os.environ["TEST_RANK"] == "1" else None)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_files_of_a_run_become_one_file(two, storage, tmp_path, same):
    saved = two.run(fit, storage, tmp_path / "run", (2, 1), 2, limit_s=LIMIT_S)[0]
    found = two.run(consolidated, storage, tmp_path / "run" / "last.ckpt", limit_s=LIMIT_S)[0]
    same(dict(found["state_dict"]), dict(saved["model"]))
    same(found["optimizer_0"]["state"], saved["optimizer"]["state"])
    assert found["global_step"] == 2


def consolidated(storage, folder):
    """Do what `python -m lightning.pytorch.utilities.consolidate_checkpoint` does."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    with storing(storage):
        return _load_distributed_checkpoint(Path(folder))


@pytest.mark.parametrize("storage", STORAGES)
def test_the_calls_of_the_strategy_that_is_for_gpus(two, storage, tmp_path, same):
    """FSDPStrategy refuses CPUs; FSDP itself does not. It finds DCP's reader by name, and goes by an older function."""
    for before, after in two.run(as_fsdp_strategy, storage, tmp_path / "last.ckpt", limit_s=LIMIT_S):
        same(after, before)


def as_fsdp_strategy(storage, path):
    """Save and load as `FSDPStrategy.save_checkpoint` and `load_checkpoint` do."""
    import torch
    from lightning.fabric.strategies.fsdp import (
        _distributed_checkpoint_load,
        _distributed_checkpoint_save,
        _get_sharded_state_dict_context,
    )
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
        model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=True)
        adam = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
        model(torch.ones(2, 6)).sum().backward()
        adam.step()
        with storing(storage), _get_sharded_state_dict_context(model):
            held = {"model": model.state_dict()}
            if seed == 0:
                optimizer = FullyShardedDataParallel.optim_state_dict(model, adam)
                _distributed_checkpoint_save({**held, "optimizer_0": optimizer}, path)
            else:
                from torch.distributed.checkpoint import FileSystemReader

                _distributed_checkpoint_load(held, path)
                model.load_state_dict(held["model"])
                found = load_sharded_optimizer_state_dict(held["model"], "optimizer_0", FileSystemReader(path=path))
                adam.load_state_dict(
                    FullyShardedDataParallel.optim_state_dict_to_load(model, adam, found["optimizer_0"])
                )
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            states.append([dict(model.state_dict()), FullyShardedDataParallel.optim_state_dict(model, adam)])
    return states


def test_what_the_page_shows(tmp_path, same):
    """Run twice: the second run finds all done."""
    with pool(2) as ranks:
        first, second = (ranks.run(as_shown, tmp_path, limit_s=LIMIT_S)[0] for _ in range(2))
    assert first["step"] == 3
    same(second, first)
    assert names(tmp_path / "checkpoints") == ["last.ckpt", "step=3.ckpt"]
    check_ours(tmp_path / "checkpoints" / "last.ckpt", second, same)


def as_shown(folder):
    as_torchrun(2)
    found = shown("program_lightning.py", folder, module=net(), batches=batches())
    return state_of(found["trainer"], found["trainer"].lightning_module)
