"""Worlds of 2 to 4 ranks save in every way while one rank is killed, fails or is late at a random effect.

After each: the path holds the old checkpoint or the new one, whole; every other rank has ended by itself and in time,
with success or a `CheckpointError`; nobody was aborted; `sweep` leaves checkpoints only; the next save works.
`python -m tests.soak.soak --kills 500 --load 2` runs until so many ranks were killed. The seed is printed: with
`--seed` it runs again.
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
from collections import Counter
from pathlib import Path

import numpy as np

import functional_ckpt as fc
from functional_ckpt.run.comm import LocalGather

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("overwrite", "async", "sync", "async fresh", "marker", "dcp", "dcp async")
#: Kinds that replace what the path holds; the others save to a new path.
OVERWRITES = ("overwrite", "async", "dcp", "dcp async")


class Soak:
    """A zygote, and what has been seen so far."""

    def __init__(self, seed, kinds=KINDS, load=0):
        import torch.distributed as dist

        self.random, self.seed, self.kinds = random.Random(seed), seed, kinds
        self.seen, self.problems, self.rounds = Counter(), [], 0
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.soak.zygote"]
        self.zygote = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]

    def close(self):
        """End all processes."""
        for process in (self.zygote, *self.busy):
            process.kill()
            process.wait()
        self.zygote.stdin.close()
        self.zygote.stdout.close()

    def round(self):
        """Let one world save; note what went wrong."""
        choose, kind = self.random, self.random.choice(self.kinds)
        place = tempfile.mkdtemp(prefix="soak-")
        act = choose.choices(["kill", "fail", "sleep"], [20, 5, 1])[0]
        # The first save connects the ranks; only from the second on, one has about as many effects as the next.
        faulty = choose.choices([1, 2], [1, 4])[0]
        count = faulty + (1 if act == "kill" else 2)
        names = ["a"] * count if kind in OVERWRITES else [*"abcd"[:count]]
        size, timeout_s = choose.randint(2, 4), 3.0 if act == "sleep" else 20.0
        order = {
            "seed": choose.randrange(2**30), "size": size, "kind": kind, "place": place, "name": str(self.rounds),
            "port": choose.choice([self.store.port, None]), "timeout_s": timeout_s, "limit_s": 90.0,
            "victim": choose.randrange(size), "act": act, "share": choose.random(), "paths": names,
            "steps": [*range(1, count + 1)], "faulty": faulty,
            "ends": choose.random() < 0.3,
        }  # fmt: skip
        self.rounds += 1
        self.zygote.stdin.write(json.dumps(order) + "\n")
        self.zygote.stdin.flush()
        answer = json.loads(self.zygote.stdout.readline())
        before = len(self.problems)
        self.judge(order, answer)
        if len(self.problems) == before:
            shutil.rmtree(place, ignore_errors=True)

    def judge(self, order, answer):
        """Compare what has happened with what is promised."""
        size, victim, act, ended = order["size"], order["victim"], order["act"], answer["ended"]
        was_killed = ended[victim] == -9
        self.seen.update([act if act != "kill" or was_killed else "kill that came too late", order["kind"]])
        self.seen["seconds"] += answer["seconds"]
        for rank in range(size):
            if was_killed and rank == victim:
                continue
            if rank in answer["hung"] or ended[rank] != 0:
                self.complain(order, f"rank {rank} has ended with {ended[rank]}; hung: {answer['hung']}")
                continue
            self.judge_outcomes(order, rank, json.loads(Path(order["place"], f"outcome.{rank}").read_text()))
        self.judge_files(order)

    def judge_outcomes(self, order, rank, found):
        """Complain of an error that is not ours, or of a save that failed though nothing was wrong."""
        for number, outcome in enumerate(found):
            if outcome is None:
                continue
            self.seen["errors"] += 1
            is_ours = outcome[0] == "CheckpointError" or order["kind"].startswith("dcp")
            if number != order["faulty"] and not (order["act"] == "sleep" and number > order["faulty"]):
                self.complain(order, f"rank {rank}: save {number} failed: {outcome}")
            elif not is_ours:
                self.complain(order, f"rank {rank}: save {number}: {outcome}")

    def judge_files(self, order):
        """Complain of a checkpoint that is neither old nor new, of what sweep leaves, and of a next save that fails."""
        place, overwrites = Path(order["place"]), order["kind"] in OVERWRITES
        try:
            steps = {name: self.step_at(place / name) for name in set(order["paths"])}
            after = order["faulty"] + 1  # the first step that may have failed
            allowed = {
                name: {step, None} if step >= after else {step} for name, step in zip("abcd", range(1, 5), strict=True)
            }
            if overwrites:
                allowed["a"] = {after - 1, *order["steps"][after - 1 :]}
            if any(step not in allowed[name] for name, step in steps.items()):
                self.complain(order, f"the paths hold {steps}")
            fc.sweep(place)
            for name in order["paths"]:
                if (place / name).is_dir():
                    fc.sweep(place / name)
            left = [p.name for p in place.iterdir() if p.name.startswith(".")]
            if left:
                self.complain(order, f"sweep has left {left}")
            policy = fc.SavePolicy(commit="marker" if order["kind"] == "marker" else "auto", durability="none")
            name = next((n for n in order["paths"] if steps[n] is None), "next")
            fc.save({"w": np.ones(3)}, place / name, policy=policy, process_group=LocalGather())
        except Exception as error:
            self.complain(order, f"{type(error).__name__}: {error}")

    def step_at(self, path):
        """Return the step whose checkpoint is whole at a path, None if there is no checkpoint."""
        if not (path / "zarr.json").exists():
            return None
        if not fc.verify(path).ok:
            raise ValueError(f"{path} is damaged")
        found = fc.open_checkpoint(path)
        held = {float(x) for key in ("rows", "columns", "copy") for x in np.unique(found[key][...])}
        step = found.tree()["step"]
        if held != {float(step)}:
            raise ValueError(f"{path} mixes {held} and {step}")
        return step

    def complain(self, order, text):
        """Note a broken promise."""
        self.problems.append(f"{text}\n  {json.dumps(order)}")
        print(f"PROBLEM {text}\n  {json.dumps(order)}", flush=True)


def soak(kills, seconds, seed, kinds=KINDS, load=0):
    """Run until so many ranks were killed or so many seconds have passed; return what was seen, and the problems."""
    running, ends = Soak(seed, kinds, load), time.monotonic() + seconds
    try:
        while running.seen["kill"] < kills and time.monotonic() < ends:
            running.round()
            if running.rounds % 50 == 0:
                print(running.rounds, dict(running.seen), len(running.problems), flush=True)
    finally:
        running.close()
    return dict(running.seen), running.problems


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    seen, problems = soak(options.kills, options.seconds, options.seed, options.kinds, options.load)
    print(f"{seen}; {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
