"""`examples/train_resume.py` killed at random and started again on other numbers of ranks, against a run never killed.

`python -m tests.soak.resume --kills 20`. Ranks are killed (SIGKILL, one or all) or told to stop (SIGTERM, one or all)
at a random moment, some before their first step. After each: the others have ended by themselves, every step that is
listed verifies, and a run that was told to stop has saved the step it was at. In the end the losses of all steps are
those of the run that was never killed. The seed is printed: with `--seed` it runs again.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import functional_ckpt as fc

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/train_resume.py"
#: Seen: differences up to 1e-6 between numbers of ranks. A step lost or done twice shifts all by 1e-2 and more.
TOLERANCE = 1e-4
#: What a rank may take to end once another one is dead: it waits for it for the first, and ends.
PATIENCE_S, LIMIT_S = 60, 90


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class World:
    """The ranks of one start, and what rank 0 has printed."""

    def __init__(self, root, size, steps, patience_s=PATIENCE_S):
        self.log = Path(tempfile.mkstemp(suffix=".log")[1])
        environment = {
            **os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, str(SCRIPT), str(root), "--steps", str(steps), "--save-every", "3"]
        command += ["--patience", str(patience_s)]
        with open(self.log, "a") as out:
            self.ranks = [
                subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=out, stderr=out)
                for rank in range(size)
            ]

    def losses(self):
        """Return the losses by step, as far as they are printed whole."""
        lines = [line.split() for line in self.log.read_text().split("\n")[:-1] if line.startswith("step ")]
        return {int(step): float(loss) for _, step, _, loss in lines}

    def wait_for(self, count):
        """Wait until so many steps are done, or a rank has ended."""
        while len(self.losses()) < count and all(rank.poll() is None for rank in self.ranks):
            time.sleep(0.005)

    def finish(self):
        """Wait for a run that nobody disturbs; return how its ranks have ended."""
        return [rank.wait() for rank in self.ranks]

    def end(self):
        """Wait for all ranks, not for long; return how they have ended, None for one that had to be killed."""
        ends, codes = time.monotonic() + LIMIT_S, []
        for rank in self.ranks:
            try:
                codes.append(rank.wait(max(0.1, ends - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        return codes


def one_kill(choose, root, steps, seen, losses):
    """Start a run, kill or stop it, and return what went wrong; its losses are added to those found before."""
    size, act, whom = choose.randint(2, 4), choose.choice(["KILL", "KILL", "TERM"]), choose.choice(["one", "all"])
    early = act == "KILL" and choose.random() < 0.15
    world = World(root, size, steps)
    world.wait_for(0 if early else choose.randint(1, 8))
    time.sleep(choose.random() * (6.0 if early else 0.1))
    victims = world.ranks if whom == "all" else [choose.choice(world.ranks)]
    for victim in victims:
        victim.send_signal(getattr(signal, f"SIG{act}"))
    codes = world.end()
    losses.append(world.losses())
    left = fc.Checkpoints(root).steps()
    print(f"{size} ranks, SIG{act} to {whom}{' early' * early}: {codes}, trained {[*world.losses()][-1:]}, left {left}",
          flush=True)  # fmt: skip
    seen.update([f"SIG{act} to {whom}", f"{size} ranks"])
    problems = [f"{path} is damaged" for step in left if not fc.verify(path := fc.Checkpoints(root).info(step).path).ok]
    if -9 not in codes and act == "KILL":
        problems.append(f"the ranks ended by themselves before one could be killed: {codes}")
    if None in codes:
        problems.append(f"a rank did not end: {codes}")
    if act == "TERM" and (set(codes) != {0} or [*left][-1:] != [*world.losses()][-1:]):
        problems.append("a run that was told to stop has not saved its last step and ended")
    return [f"{problem}\n{world.log.read_text()[-3000:]}" for problem in problems]


def soak(kills, steps, seed, place):
    """Return what was seen, and the problems."""
    choose, seen, problems = random.Random(seed), Counter(), []
    whole = World(place / "whole", 3, steps)
    if set(whole.finish()) != {0}:
        return seen, [whole.log.read_text()]
    losses = []
    for _ in range(kills):
        problems += one_kill(choose, place / "killed", steps, seen, losses)
    world = World(place / "killed", choose.randint(2, 4), steps)
    problems += [] if set(world.finish()) == {0} else [world.log.read_text()]
    expected, losses = whole.losses(), [*losses, world.losses()]
    print(f"losses from {expected[1]} to {expected[steps]}; {sum(map(len, losses))} steps trained for {steps}")
    apart = [abs(loss - expected[step]) for each in losses for step, loss in each.items()]
    print(f"at most {max(apart):.1e} from the run that was never killed")
    if set().union(*losses) != {*expected} or max(apart) > TOLERANCE:
        problems.append(f"the losses differ: {expected} and {losses}")
    left = sorted(path.name for path in (place / "killed").iterdir() if not path.name.startswith("step-"))
    return seen, problems + [f"left over: {name}" for name in left]


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        seen, problems = soak(options.kills, options.steps, options.seed, Path(place))
    print(f"{dict(seen)}; {len(problems)} problems")
    print("\n".join(problems))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
