"""Saves to and loads from an object store with latency: ``python -m benchmarks.object_stores [--quick]``.

A server on 127.0.0.1 stands behind a proxy that adds 20 ms to each request. Ours, DCP over s3fs, and the same bytes
sent or read by TensorStore's key-value store alone take turns; ratios compare runs of one round. Many small tensors are
compared with the same objects put or fetched one request after the other: a part of them, scaled. At last peak memory
against the budget. Below each table stand the requests of one run each, as the proxy saw them, and who needed the CPU.

Servers: ``memory`` (this repository's, 0.1 ms for a request), and ``moto`` and ``swift`` where they are installed.
Needs s3fs.
"""

import itertools
from functools import partial

import attrs
from rich.console import Console

from benchmarks.figures import Figure
from benchmarks.measure import ratio, rotated, timed
from benchmarks.objects import peak, ways
from benchmarks.objects.start import MEMORY, SERVERS, described, reached
from benchmarks.objects.state import chunked_state
from benchmarks.options import chosen_size, new_parser, tell
from benchmarks.state import MIB, blank_like, require_equal, small_state
from benchmarks.table import WIDTH, figure_table, new_table, time_cells

PARTS = ("large save", "large load", "small save", "small load", "peak save", "peak load")
_NUMBERS = itertools.count()


@attrs.frozen
class Size:
    """How much is saved, and how often; every `apart`-th small tensor goes one request after the other."""

    large_nbytes: int
    small_count: int
    apart: int
    budget_nbytes: int
    rounds: int


FULL = Size(1024 * MIB, 2000, 40, 256 * MIB, 5)
QUICK = Size(128 * MIB, 200, 10, 128 * MIB, 2)


@attrs.frozen
class Part:
    """What was measured of one part: samples, and the requests of the last run in words; or the peak in bytes."""

    samples: dict = attrs.field(factory=dict)
    requests: dict = attrs.field(factory=dict)
    peak_nbytes: int = 0


def main(arguments=None):
    chosen = _parser().parse_args(arguments)
    size = chosen_size(chosen, FULL, QUICK)
    size = attrs.evolve(size, large_nbytes=chosen.mib * MIB) if chosen.mib else size
    console = Console(width=WIDTH)
    console.print(
        f"large: {size.large_nbytes // MIB} MiB in chunks of 32 MiB; small: {size.small_count} x 4 KiB; "
        f"{chosen.concurrency} in flight; {size.rounds} rounds", highlight=False,
    )  # fmt: skip
    for name in chosen.server or [MEMORY]:
        stream = f", {chosen.stream_mib:g} MiB/s on a connection" if chosen.stream_mib else ""
        title = f"{name}, {chosen.latency_ms:g} ms{stream}"
        found = {}
        with reached(name, chosen.latency_ms, chosen.stream_mib) as server:
            for part in chosen.part or PARTS:
                tell(f"{title}: {part} ...")
                found[part] = _measured(part, server, size, chosen.concurrency)
                _show(console, f"{title}: {part}", found[part])
        console.print(figure_table(f"figures: {title}", _figures(size), found))


def _measured(part, server, size, concurrency):
    which, what = part.split()
    if which == "peak":
        nbytes = peak.measure(what, size.large_nbytes, size.budget_nbytes, concurrency)
        server.empty()
        return Part(peak_nbytes=nbytes)
    state = chunked_state(size.large_nbytes) if which == "large" else small_state(size.small_count)
    apart = size.apart if which == "small" else 0
    competitors = ways.ways(server, state, concurrency, what, apart)
    for one in competitors:
        if one.name in (ways.OURS, ways.DCP):  # imports and connections
            one.save(small_state(4), f"run-{next(_NUMBERS)}")
    if what == "save":
        return _saves(competitors, state, server, size.rounds)
    places = {one.name: f"run-{next(_NUMBERS)}" for one in competitors}
    for one in ways.ways(server.without_proxy(), state, concurrency, what, apart):
        one.save(state, places[one.name])
    return _loads(competitors, places, state, server, size.rounds)


def _saves(competitors, state, server, rounds):
    part = Part({one.name: [] for one in competitors})
    for number in range(rounds):
        for one in rotated(competitors, number):
            _run(part, one, one.save, state, server, f"run-{next(_NUMBERS)}")
            server.empty()
    return part


def _loads(competitors, places, state, server, rounds):
    part, into = Part({one.name: [] for one in competitors}), blank_like(state)
    for number in range(rounds):
        for one in rotated(competitors, number):
            _run(part, one, one.load, into, server, places[one.name])
            if number == 0 and one.name in (ways.OURS, ways.DCP):
                require_equal(into, state, one.name)
                for group in into.values():
                    for tensor in group.values():
                        tensor.fill_(-1.0)
    server.empty()
    return part


def _run(part, one, call, state, server, place):
    server.log()
    before = server.cpu_s()
    found = timed(partial(call, state, place))
    proxy_s, server_s = (now - then for now, then in zip(server.cpu_s(), before, strict=True))
    tell(f"  {one.name}: {found.wall * one.scale:.3f} s")
    part.samples[one.name].append(attrs.evolve(found, wall=found.wall * one.scale, cpu=found.cpu * one.scale))
    part.requests[one.name] = (
        f"{described(server.log())}; CPU s of client {found.cpu:.2f}, proxy {proxy_s:.2f}, server {server_s:.2f}"
    )


def _show(console, title, part):
    if part.peak_nbytes:
        console.print(f"{title}: {part.peak_nbytes / MIB:.0f} MiB", highlight=False)
        return
    table = new_table(title, "", "wall s", "min - max", "CPU s", "wall / ours")
    for one, runs in part.samples.items():
        table.add_row(one, *time_cells(runs), f"{ratio(part.samples, one, ways.OURS):.2f}")
    console.print(table)
    console.print(*(f"{one}: {text}" for one, text in part.requests.items()), sep="\n", highlight=False)


def _figures(size):
    budget = f"(64 MiB + budget of {size.budget_nbytes // MIB} MiB)"
    return tuple(
        figure
        for what in ("save", "load")
        for figure in (
            Figure(f"large {what}: DCP over s3fs / ours", ">=", 4, _ratio(f"large {what}", ways.DCP)),
            Figure(f"large {what}: throughput / the bare store's", ">=", 0.7, _ratio(f"large {what}", ways.BARE)),
            Figure(f"small {what}: one after the other / ours", ">=", 10, _ratio(f"small {what}", ways.SERIAL)),
            Figure(f"{what}: peak extra memory / {budget}", "<=", 1, partial(_peak, size, what)),
        )
    )


def _ratio(part, other):
    return lambda found: ratio(found[part].samples, other, ways.OURS)


def _peak(size, what, found):
    return found[f"peak {what}"].peak_nbytes / (64 * MIB + size.budget_nbytes)


def _parser():
    parser = new_parser("benchmarks.object_stores", __doc__)
    parser.add_argument("--server", action="append", choices=list(SERVERS), help="repeatable; default: memory")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    parser.add_argument("--mib", type=int, help="size of the large state; default: 1024")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="added to each request; default: 20")
    parser.add_argument(
        "--stream-mib", type=float, default=0.0,
        help="MiB/s that one connection carries, as servers far away limit it; default: as many as this machine does",
    )  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time; default: 32")
    return parser


if __name__ == "__main__":
    main()
