"""The CheckpointIO of docs/programs.md within Lightning's Trainer, on one device and where ranks hold copies."""

import pytest

from tests import pages
from tests.programs.setting import LIMIT_S, as_torchrun, pool
from tests.programs.test_lightning import batches, names, net

pytestmark = pytest.mark.mp


@pytest.fixture(scope="module")
def one():
    """A process of its own: Lightning warns of much."""
    with pool(1) as ranks:
        yield ranks


def fit(kind, folder, size, to_step, resume=None, weights_only=None):
    """Train `to_step` steps, saving after each; return what a resumed run must equal."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

    as_torchrun(size)
    ours = pages.shown("programs.md", "program_checkpoint_io.py")["ZarrCheckpointIO"]
    plugin = {"torch": TorchCheckpointIO, "ours": ours, "async": lambda: AsyncCheckpointIO(ours())}[kind]()
    keeper = ModelCheckpoint(folder, "{step}", monitor="loss", save_last=True, save_top_k=2)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=size, strategy="auto" if size == 1 else "ddp", max_steps=to_step,
        callbacks=[keeper], logger=False, plugins=[plugin], enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = net(logs=True)
    trainer.fit(module, batches(), ckpt_path=resume, weights_only=weights_only)
    (adam,) = trainer.optimizers
    rate = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return {
        "step": trainer.global_step,
        "model": dict(module.state_dict()),
        "optimizer": adam.state_dict(),
        "rate": rate,
    }


@pytest.mark.parametrize("kind", ["ours", "async"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_goes_on_equals_one_of_lightnings_own(one, two, size, kind, tmp_path, same):
    ranks = {1: one, 2: two}[size]
    unbroken = ranks.run(fit, "torch", tmp_path / "unbroken", size, 4, limit_s=LIMIT_S)
    ranks.run(fit, kind, tmp_path / "run", size, 2, limit_s=LIMIT_S)
    same(ranks.run(fit, kind, tmp_path / "run", size, 4, "last", limit_s=LIMIT_S), unbroken)
    assert names(tmp_path / "run") == names(tmp_path / "unbroken") == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]


def test_what_lightning_saves_comes_back_as_it_was(one, tmp_path, same):
    """Loops, callbacks, tensors among plain values, int keys, empty dicts; an OrderedDict becomes a dict."""
    one.run(fit, "torch", tmp_path / "run", 1, 2, limit_s=LIMIT_S)
    given, found = one.run(through_ours, tmp_path / "run" / "last.ckpt", limit_s=LIMIT_S)[0]
    same(found, {**given, "state_dict": dict(given["state_dict"])})


def through_ours(path):
    """Return what Lightning saved, and the same saved and loaded by the program of the page."""
    from lightning.pytorch.plugins import TorchCheckpointIO

    given = TorchCheckpointIO().load_checkpoint(path)
    ours = pages.shown("programs.md", "program_checkpoint_io.py")["ZarrCheckpointIO"]()
    ours.save_checkpoint(given, path.with_suffix(".ours"))
    return given, ours.load_checkpoint(path.with_suffix(".ours"))
