"""Real training state: what optimizers, schedulers and scalers hold comes back equal, and training goes on."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from functional_ckpt import PerRank, load, open_checkpoint, save
from functional_ckpt.spec.tree import map_leaves

SCHEDULERS = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 2, 5]),  # holds a Counter
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.001, 0.1, 3, cycle_momentum=False),
    "LinearLR": lambda o: lrs.LinearLR(o),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.CosineAnnealingLR(o, 5)], [3]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.8)], o),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.8, 0.95)),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, maximize=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


class Run:
    """A small training run: tied weights, a buffer, dropout."""

    def __init__(self, optimizer="AdamW", scheduler="StepLR"):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 4),
            torch.nn.BatchNorm1d(4),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(4, 4),
            torch.nn.Linear(4, 2),
        )
        self.model[3].weight = self.model[0].weight
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**3, growth_interval=2)

    def step(self, n):
        losses = []
        for _ in range(n):
            x = torch.randn(8, 4)

            def closure(x=x):
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                loss = self.optimizer.step(closure)
            else:
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            plateau = isinstance(self.scheduler, lrs.ReduceLROnPlateau)
            self.scheduler.step(*([float(loss.detach())] if plateau else []))
            losses.append(loss.detach().clone())
        return torch.stack(losses)

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": PerRank(torch.get_rng_state()),
        }

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"].value)


CASES = [("AdamW", scheduler) for scheduler in SCHEDULERS] + [(optimizer, "StepLR") for optimizer in OPTIMIZERS]
QUIET = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*epoch parameter.*:UserWarning")


def blank(state):
    """The same tree, without what the checkpoint is to give."""
    value = PerRank(torch.zeros_like(state["rng"].value))
    rest = {key: part for key, part in state.items() if key != "rng"}
    return {**map_leaves(lambda _, x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else None, rest), "rng": value}


@QUIET
@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_training_goes_on_identically(optimizer, scheduler, tmp_path, fast, same):
    run = Run(optimizer, scheduler)
    run.step(4)
    manifest = save(run.state(), tmp_path / "a", policy=fast)
    assert "model.3.weight" in {alias.key for alias in manifest.aliases}
    saved = copy.deepcopy(run.state())
    expected = run.step(4)
    loaded = load(blank(saved), tmp_path / "a")
    same(loaded, saved)
    other = Run(optimizer, scheduler)
    other.step(1)
    other.restore(loaded)
    assert torch.equal(other.step(4), expected)
    same(other.state()["optimizer"], run.state()["optimizer"])
    same(other.state()["scheduler"], run.state()["scheduler"])
    same(other.state()["model"], run.state()["model"])


@QUIET
def test_the_opened_state_restores_without_a_like(tmp_path, fast):
    run = Run("AdamW", "MultiStepLR")
    run.step(3)
    save(run.state(), tmp_path / "a", policy=fast)
    expected = run.step(3)
    state = open_checkpoint(tmp_path / "a").state("torch")
    other = Run("AdamW", "MultiStepLR")
    other.restore({**state, "rng": PerRank(state["rng"][0])})
    assert torch.equal(other.step(3), expected)


@QUIET
def test_in_place_into_a_live_model(tmp_path, fast):
    run = Run()
    run.step(3)
    save({"model": run.model.state_dict()}, tmp_path / "a", policy=fast)
    other = Run()
    other.step(1)
    load({"model": other.model.state_dict()}, tmp_path / "a")  # the state dict shares the memory of the model
    for one, two in zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert other.model[3].weight is other.model[0].weight
