"""States of CUDA tensors of every kind, and what the tests say about them."""

import contextlib
import threading
import time

import torch

import functional_ckpt as fc
from functional_ckpt.torch.host_view import TORCH_DTYPES

CUDA = torch.device("cuda")
CHUNK = 2**18
FAST = fc.SavePolicy(durability="none", layout=fc.LayoutPolicy(target_chunk_nbytes=CHUNK))
MIB = 2**20


def words(nbytes, seed):
    """Return bytes of every value, on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(CUDA)


def tensor(shape, dtype, seed):
    """Return a tensor of random bits (NaNs too); booleans are 0 or 1."""
    count = int(torch.Size(shape).numel())
    if dtype is torch.bool:
        return (words(count, seed) & 1).view(dtype).reshape(shape)
    return words(count * torch.empty(0, dtype=dtype).element_size(), seed).view(dtype).reshape(shape)


def of_all_data_types(seed):
    """Return for every data type a tensor, a transposed one and a strided one."""
    state = {}
    for number, (name, dtype) in enumerate(sorted(TORCH_DTYPES.items())):
        base = tensor((6, 10), dtype, seed + number)
        state[name] = {
            "plain": base,
            "transposed": tensor((5, 3), dtype, seed - number).t(),
            "strided": base[::2, 1::3],
        }
    return state


def of_all_kinds(seed):
    """Return tensors of every form: of many chunks, views, tied, empty, zero-dimensional, parameters."""
    big, wide = tensor((1024, 1024), torch.float32, seed), tensor((512, 512), torch.bfloat16, seed + 1)
    tied = tensor((300, 7), torch.float32, seed + 2)
    return {
        "big": big,
        "transposed": tensor((700, 1100), torch.float32, seed + 3).t(),
        "channels_last": tensor((8, 16, 33, 20), torch.float16, seed + 4).to(memory_format=torch.channels_last),
        "every_third": wide[:, ::3],
        "narrow": wide[100:200, 7:300],
        "permuted": tensor((3, 50, 60), torch.int64, seed + 5).permute(2, 0, 1),
        "scalar": torch.tensor(float(seed), device=CUDA),
        "empty": torch.empty((3, 0, 2), device=CUDA),
        "tied": tied,
        "tied_too": tied,
        "half_of_tied": tied[:150],
        "parameter": torch.nn.Parameter(torch.nan_to_num(tensor((40, 50), torch.float32, seed + 6))),
        "needs_grad": torch.nan_to_num(tensor((9,), torch.float64, seed + 7)).requires_grad_(),
        "complex": tensor((30, 31), torch.complex64, seed + 8),
        "on_the_host": torch.arange(seed, seed + 5),
    }


def leaves_of(state, prefix=""):
    """Return the tensors of a state by key."""
    found = {}
    for key, value in state.items():
        found |= leaves_of(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def bits(state):
    """Return what each tensor holds now, on the host, as bytes in C order, once the device is idle."""
    torch.cuda.synchronize()
    found = {}
    for key, leaf in leaves_of(state).items():
        plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        found[key] = leaf.dtype, tuple(leaf.shape), plain.view(torch.uint8).numpy().tobytes()
    return found


def check_bits(found, expected):
    """Fail unless what two states held is the same bit for bit."""
    assert found.keys() == expected.keys()
    wrong = [key for key in found if found[key] != expected[key]]
    assert not wrong, wrong


def blank(state):
    """Set every element of a state to another one."""
    with torch.no_grad():
        for leaf in leaves_of(state).values():
            leaf.zero_()


def on_host(state):
    """Return a blank state of the same tensors on the host."""
    return {k: on_host(v) if isinstance(v, dict) else torch.zeros_like(v, device="cpu") for k, v in state.items()}


def late(seconds=0.25):
    """Let the current stream wait for so long, about."""
    torch.cuda._sleep(int(seconds * 1.9e9))


@contextlib.contextmanager
def busy(stream):
    """Keep a stream busy: what is queued on it begins some milliseconds later, whenever that is."""
    ends = threading.Event()

    def keep():
        queued = []
        with torch.cuda.stream(stream):
            while not ends.is_set():
                if len(queued) < 2:
                    late(0.02)
                    queued.append(stream.record_event())
                queued = [event for event in queued if not event.query()]
                time.sleep(0.0005)

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield
    finally:
        ends.set()
        keeper.join()


@contextlib.contextmanager
def device_memory(at_most, held=0):
    """Fail if the block takes more than so many bytes of the device at once, or has more than `held` at the end."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    assert peak <= at_most, f"{peak / MIB:.1f} MiB at once"
    assert after <= held, f"{after / MIB:.1f} MiB are held"


STATES = {"data types": of_all_data_types, "kinds": of_all_kinds}
