"""A tiny GPT trains on four ranks of an unmodified megatron-core, is killed again and again, and resumes elsewhere.

Each life has another layout (TP, PP, DP) than the one before. It loads the iteration that the tracker names, trains,
and saves after each step, now or in the background, over whatever lives before have left there; at a random effect of
that a rank is killed, and soon after it all others. Its losses are those of runs that were never killed, within twice
what those differ by from layout to layout. `python -m tests.soak.megatron --kills 30` prints its seed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
SIZE = 4
TRACKER = "latest_checkpointed_iteration.txt"
#: What losses that are equal may differ by where the runs compared happen to agree.
ROUNDING = 1e-6


# --- a rank ---


def live(order, rank):
    """Do what `order` says, as one rank of Megatron's."""
    import torch.distributed as dist

    from tests.mp.cpu_as_cuda import pretend
    from tests.mp.megatron_training import gpt, train
    from tests.soak.rank import Effects, kill

    warnings.simplefilter("ignore")
    pretend()
    timeout = timedelta(seconds=order["limit_s"] / 2)
    store = dist.TCPStore("127.0.0.1", order["port"], is_master=False, timeout=timeout)
    store = dist.PrefixStore(order["name"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    place = Path(order["place"])
    training = Training(place, order["life"], *gpt(*order["layout"], distributed=False))
    train(training.ddp, training.optimizer, 1)  # Megatron neither saves nor loads an optimizer that has not stepped
    if order["saves"] == "first":
        training.save(0, background=False)
        return
    first = int((place / TRACKER).read_text())
    training.load(first)
    effects = Effects(str(place))
    with effects.watched(order["at"] if rank == order["victim"] else -1, kill):
        for iteration in range(first + 1, first + 1 + order["steps"]):
            (loss,) = train(training.ddp, training.optimizer, 1)
            if rank == 0:
                with open(place / order["losses"], "a") as file:
                    file.write(json.dumps([iteration, loss, order["layout"]]) + "\n")
            if order["saves"]:
                training.save(iteration, background=order["saves"][iteration % len(order["saves"])] == "background")
        training.finish()
    (place / f"effects.{rank}").write_text(str(effects.count))


class Training:
    """Model and optimizer of one rank, and the saves that are under way."""

    def __init__(self, place, life, ddp, optimizer):
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self.place, self.life, self.ddp, self.optimizer = place, life, ddp, optimizer
        self.queue = AsyncCallsQueue()

    def state(self, iteration=None):
        """Return Megatron's sharded state dict, to load into if there is no iteration."""
        import torch
        import torch.distributed as dist
        from megatron.core.dist_checkpointing import ShardedTensor

        model, is_loading = self.ddp.module.sharded_state_dict(), iteration is None
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading)
        life = ShardedTensor.from_rank_offsets("life", torch.tensor([self.life]), replica_id=dist.get_rank())
        return {"model": model, "optimizer": optimizer, "life": life, "of": {"life": self.life, "iteration": iteration}}

    def save(self, iteration, background):
        """Save as a training script does: the tracker names an iteration once it is there."""
        import torch.distributed as dist
        from megatron.core import dist_checkpointing as mcore

        from functional_ckpt.torch.megatron.plugin import ZarrSaveStrategy

        self.finish()
        path = self.place / f"iter_{iteration:07d}"
        path.mkdir(exist_ok=True)
        dist.barrier()
        request = mcore.save(self.state(iteration), str(path), ZarrSaveStrategy(), async_sharded_save=background)
        if background:
            request.add_finalize_fn(lambda: self.track(iteration))
            self.queue.schedule_async_request(request)
        else:
            self.track(iteration)

    def track(self, iteration):
        """Name the newest iteration, whole or not at all."""
        import torch.distributed as dist

        if dist.get_rank() == 0:
            (self.place / "tracker.new").write_text(str(iteration))
            (self.place / "tracker.new").rename(self.place / TRACKER)
        dist.barrier()

    def finish(self):
        """Wait for saves in the background."""
        self.queue.maybe_finalize_async_calls(blocking=True)

    def load(self, iteration):
        """Load what the tracker names."""
        from megatron.core import dist_checkpointing as mcore

        found = mcore.load(self.state(), str(self.place / f"iter_{iteration:07d}"))
        assert found["of"] == {"life": found["life"].item(), "iteration": iteration}, found["of"]
        self.ddp.module.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        for part in self.optimizer.chained_optimizers:
            for values in part.optimizer.state.values():
                values["step"] = values["step"].clone()  # Megatron may give all parameters one, which then runs ahead


# --- all of them ---


class Soak:
    """A zygote, a place, and what has been seen so far."""

    def __init__(self, seed):
        import torch.distributed as dist

        self.random, self.seed, self.seen, self.problems = random.Random(seed), seed, Counter(), []
        self.place = Path(tempfile.mkdtemp(prefix="megatron-soak-"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.layout, self.life, self.effects = None, 0, []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.megatron", "--zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def close(self):
        """End the zygote, and keep what there is to look at."""
        self.zygote.kill()
        self.zygote.wait()
        self.zygote.stdin.close()
        self.zygote.stdout.close()
        if not self.problems:
            shutil.rmtree(self.place)

    def run(self, layout, steps, losses, **more):
        """Let four ranks live; return how each has ended."""
        self.life += 1
        order = {"size": SIZE, "place": str(self.place), "name": str(self.life), "life": self.life, "layout": layout,
                 "port": self.store.port, "limit_s": 240.0, "steps": steps, "losses": losses, "victim": -1, "at": -1,
                 "ends": False, **more}  # fmt: skip
        self.zygote.stdin.write(json.dumps(order) + "\n")
        self.zygote.stdin.flush()
        answer = json.loads(self.zygote.stdout.readline())
        if order["victim"] < 0 and answer["ended"] != [0] * SIZE:
            logs = "\n".join((self.place / f"log.{rank}").read_text()[-3000:] for rank in range(SIZE))
            self.problems.append(f"life {self.life} has failed: {answer}\n{json.dumps(order)}\n{logs}")
        return answer["ended"]

    def killed(self):
        """Let a life end at a random effect; look at what it leaves."""
        self.layout = self.random.choice([layout for layout in LAYOUTS if layout != self.layout])
        victim = self.random.choice([0, 0, *range(SIZE)])  # rank 0 has most of the effects
        if not self.effects:  # those of the life before, which nobody killed
            self.effects = [int((self.place / f"effects.{rank}").read_text()) for rank in range(SIZE)]
        at = self.random.randint(1, self.effects[victim])
        saves = self.random.choice([["now"], ["background"], ["now", "background"]])
        ended = self.run(self.layout, 2, "losses", saves=saves, victim=victim, at=at,
                         grace_s=self.random.choice([0.0, 0.0, 0.5]))  # fmt: skip
        was_killed = ended[victim] == -9
        self.seen.update(["kill" if was_killed else "kill that came too late", saves[0]])
        if not was_killed:
            self.require(ended == [0] * SIZE, f"life {self.life} has ended with {ended}")
        for path in sorted(self.place.glob("iter_*")):
            self.seen[self.look(path)] += 1

    def look(self, path):
        """Return what lies in a directory, all of it of one life; only the one that was being saved may be refused."""
        import functional_ckpt
        from functional_ckpt.torch.megatron.serialization import load_common_state_dict

        try:
            of = load_common_state_dict(path)["of"]
            life = int(functional_ckpt.open_checkpoint(path)["life"][0])
            self.require(functional_ckpt.verify(path).ok, f"{path} is damaged")
        except functional_ckpt.errors.CheckpointError as error:
            newer = int(path.name[5:]) > self.iteration()
            self.require(newer, f"the tracker names {self.iteration()}, and {path} is refused: {error}")
            return "refused"
        self.require(of == {"life": life, "iteration": int(path.name[5:])}, f"{path} is of life {life} and of {of}")
        is_new = int(path.name[5:]) > self.iteration()
        return "whole, and not named" if is_new else "whole"

    def iteration(self):
        """Return the iteration that a restart loads."""
        return int((self.place / TRACKER).read_text())

    def require(self, holds, text):
        """Note a broken promise."""
        if not holds:
            self.problems.append(text)
            print("PROBLEM", text, flush=True)


def soak(kills, seed):
    """Kill so many lives; return what was seen, and the problems."""
    running = Soak(seed)
    try:
        running.run((2, 1), 0, "", saves="first")
        running.run((2, 1), 2, "losses", saves=["now", "background"])
        while running.seen["kill"] < kills and not running.problems:
            running.killed()
            print(running.life, running.iteration(), dict(running.seen), flush=True)
        if not running.problems:
            running.run((2, 2), 2, "losses", saves=["now"])
            compare(running)
    finally:
        running.close()
    return dict(running.seen), running.problems


def compare(running):
    """Compare all losses with those of runs that were never killed, and these with one another."""
    last = running.iteration()
    (running.place / TRACKER).write_text("0")
    for layout in LAYOUTS:
        running.run(layout, last, "never-killed", saves=[])
    kept = [json.loads(line) for line in (running.place / "never-killed").read_text().splitlines()]
    found = [json.loads(line) for line in (running.place / "losses").read_text().splitlines()]
    worst = widest = 0.0
    for iteration in range(1, last + 1):
        expected = [loss for number, loss, _ in kept if number == iteration]
        running.require(len(expected) == len(LAYOUTS), f"iteration {iteration} was not reached")
        spread = max(expected) - min(expected)
        widest = max(widest, spread / expected[0])
        for number, loss, layout in found:
            if number == iteration:
                worst = max(worst, abs(loss - expected[0]) / expected[0])
                near = min(expected) - spread - ROUNDING * loss <= loss <= max(expected) + spread + ROUNDING * loss
                running.require(near, f"iteration {iteration} under {layout}: loss {loss}, never killed {expected}")
    running.require({number for number, _, _ in found} == {*range(1, last + 1)}, "iterations are missing")
    print(f"{len(found)} losses up to iteration {last}, from {kept[0][1]} to {kept[last - 1][1]}, differ by at most "
          f"{worst:.1e} of the loss from those never killed, and those by {widest:.1e} from one another")  # fmt: skip


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--zygote", action="store_true", help="fork ranks, for another of these")
    options = parser.parse_args()
    if options.zygote:
        serve_ranks()
        return
    print(f"seed {options.seed}", flush=True)
    seen, problems = soak(options.kills, options.seed)
    print(f"{seen}; {len(problems)} problems", *problems, sep="\n")
    sys.exit(bool(problems))


def serve_ranks():
    """Import what takes seconds, then fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.dist_checkpointing
        import megatron.core.models.gpt  # noqa: F401

        import functional_ckpt.torch.megatron.plugin
        import functional_ckpt.torch.megatron.serialization  # noqa: F401
        import tests.mp.megatron_training  # noqa: F401
    from tests.soak import zygote

    zygote.serve(live)


if __name__ == "__main__":
    main()
