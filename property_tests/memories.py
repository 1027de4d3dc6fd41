"""A memory of plans for each of several simulated ranks, as their processes would have."""

import threading

from functional_ckpt.run.planning import PlanMemory


class ByRank:
    """Stands in for the memory of this process; each thread says in ``here.rank`` which rank it is."""

    def __init__(self):
        self.memories, self.here = {}, threading.local()

    @property
    def mine(self):
        return self.memories.setdefault(self.here.rank, PlanMemory())

    def find(self, basis):
        return self.mine.find(basis)

    def keep(self, *plan):
        self.mine.keep(*plan)

    def forget(self, rank):
        self.memories.pop(rank, None)
