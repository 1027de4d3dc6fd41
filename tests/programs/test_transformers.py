"""The Trainer of transformers with FSDP2 in shards, on CPU ranks; and what transformers saves without its Trainer.

The Trainer saves through Accelerate, which is changed in one thing, see `accelerate_on_cpu`.
"""

import os

import pytest

import functional_ckpt
from tests.programs.setting import (
    LIMIT_S,
    STORAGES,
    Death,
    accelerate_on_cpu,
    as_torchrun,
    doomed,
    pool,
    shown,
    storing,
    whole,
)
from tests.programs.test_accelerate import MODEL, OPTIMIZER, check_ours, names

pytestmark = pytest.mark.mp


def llama(seed=0):
    """Return a language model of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2))


def train(storage, folder, size, to_step, resume=None, death=None, seed=0):
    """Train `to_step` steps, saving after each and keeping two; return what a resumed run must equal."""
    import torch
    from transformers import Trainer, TrainingArguments

    as_torchrun(size)
    accelerate_on_cpu()
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, fsdp=True, max_steps=to_step, save_steps=1, save_total_limit=2,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT",
                     "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=8 // size, learning_rate=0.01, report_to=[], disable_tqdm=True,
        lr_scheduler_type="constant_with_warmup", warmup_steps=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(0, 32, (6,), generator=generator) for _ in range(16)]
    trainer = Trainer(llama(seed), arguments, train_dataset=[{"input_ids": each, "labels": each} for each in words])
    with storing(storage), doomed(death, trainer, "_save_checkpoint"):
        trainer.train(resume_from_checkpoint=resume)
    return state_of(trainer)


def state_of(trainer):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    return {
        "step": trainer.state.global_step,
        "model": whole(get_model_state_dict(trainer.model)),
        "optimizer": whole(get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer)),
        "rate": trainer.lr_scheduler.state_dict(),
    }


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [2, 4])
def test_a_run_that_goes_on_equals_one_that_never_stopped(two, four, size, storage, tmp_path, same):
    ranks = {2: two, 4: four}[size]
    unbroken = ranks.run(train, storage, tmp_path / "unbroken", size, 4, limit_s=LIMIT_S)
    ranks.run(train, storage, tmp_path / "run", size, 2, limit_s=LIMIT_S)
    resumed = ranks.run(train, storage, tmp_path / "run", size, 4, True, None, 1, limit_s=LIMIT_S)
    same(resumed, unbroken)
    assert names(tmp_path / "run") == ["checkpoint-3", "checkpoint-4"]
    if storage == "ours":
        check_ours(tmp_path / "run" / "checkpoint-4", resumed[0], same)


@pytest.fixture(scope="module")
def unbroken(two, tmp_path_factory):
    """What a run of four steps ends with."""
    return two.run(train, "stock", tmp_path_factory.mktemp("unbroken"), 2, 4, limit_s=LIMIT_S)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.7])
def test_after_a_death_the_newest_whole_checkpoint_goes_on(two, unbroken, rank, share, tmp_path, same):
    """Killed while it saves step 3. The Trainer writes `trainer_state.json` last: what lacks it is not whole."""
    with pool(2) as ranks:
        outcomes = ranks.outcomes(train_until_death, tmp_path, rank, share, limit_s=LIMIT_S)
    assert outcomes[rank].dead
    assert outcomes[1 - rank].error is not None
    newest = max(path.parent for path in tmp_path.glob("checkpoint-*/trainer_state.json"))
    assert newest.name == "checkpoint-2"
    same(two.run(train, "ours", tmp_path, 2, 4, str(newest), None, 1, limit_s=LIMIT_S), unbroken)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    for name in names(tmp_path):
        functional_ckpt.sweep(tmp_path / name)
        assert all(functional_ckpt.verify(tmp_path / name / part).ok for part in (MODEL, OPTIMIZER))
        assert not list((tmp_path / name).glob(".*"))


def train_until_death(folder, rank, share):
    mine = int(os.environ["TEST_RANK"]) == rank
    return train("ours", folder, 2, 4, death=Death(folder, 3, share) if mine else None)


@pytest.mark.parametrize("storage", STORAGES)
def test_what_transformers_saves_without_its_trainer(two, storage, tmp_path, same):
    """Its optimizer's states go by `checkpoint_id`, its weights by a writer of safetensors, which stays as it is."""
    before, after, files = two.run(save_and_load, storage, tmp_path, limit_s=LIMIT_S)[0]
    same(after, before)
    assert [name for name in files if name.endswith(".safetensors")]


def save_and_load(storage, folder):
    import torch
    import transformers.distributed.checkpoint as theirs
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    states = []
    with storing(storage):
        for seed in (0, 1):
            model = llama(seed)
            fully_shard(model)
            adam = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
            model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
            adam.step()
            if seed == 0:
                theirs._save_model_checkpoint_distributed(model, folder / "model")
                theirs.save_optimizer_distributed(model, adam, str(folder / "optimizer"))
            else:
                theirs._load_model_checkpoint_distributed(model, folder / "model")
                theirs.load_optimizer_distributed(model, adam, str(folder / "optimizer"))
            states.append([whole(model.state_dict()), whole(get_optimizer_state_dict(model, adam))])
    return *states, os.listdir(folder / "model")


def test_what_the_page_shows(tmp_path, same):
    """Run twice: the second run finds all done."""
    with pool(2) as ranks:
        first, second = (ranks.run(as_shown, tmp_path, limit_s=LIMIT_S)[0] for _ in range(2))
    assert first["step"] == second["step"] == 2
    same(second["optimizer"]["state"], first["optimizer"]["state"])
    assert names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]
    check_ours(tmp_path / "run" / "checkpoint-2", first, same)


def as_shown(folder):
    import torch

    as_torchrun(2)
    accelerate_on_cpu()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    words = torch.arange(96).reshape(16, 6) % 32
    data = [{"input_ids": each, "labels": each} for each in words]
    return state_of(shown("program_transformers.py", folder, model=llama(), data=data)["trainer"])
