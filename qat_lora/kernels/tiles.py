"""How large the pieces of a computation should be on each device."""

import torch

# Elements of a tile on the CPU. In fp32 they take 1 MB, so that a chain of operations stays in a core's cache instead
# of passing through memory once per operation.
TILE = 2**18
# Bytes of LM-head logits held at a time: in the type of the product on the CPU, in fp32 elsewhere.
HEAD_BYTES = 128 * 2**20
CUDA_HEAD_BYTES = 256 * 2**20  # fewer, larger products; not measured on hardware
# A TPU reads the head's weight, and writes its gradient, once per block of positions: this is 4 × 1,024 positions of a
# vocabulary of 152k in one (docs/benchmarks.md, "On the TPU's compiler").
XLA_HEAD_BYTES = 2560 * 2**20
STRIP_BYTES = 8 * 2**20  # bytes of logits in one strip of the vocabulary on the CPU
POSITIONS = 2048  # positions for which the CPU computes all strips before the next positions


def tiles(rows: int, width: int, device: torch.device, size: int = TILE) -> list[slice]:
    """Slices that cut a matrix [rows, width] into tiles: of about `size` elements on the CPU, at least one row each;
    one tile elsewhere, where the compiler fuses operations (XLA) or a kernel should get all the work at once (CUDA)."""
    step = rows if device.type != "cpu" else max(1, size // max(1, width))
    return _cut(rows, step)


def rows_at_once(positions: int, vocab: int, dtype: torch.dtype, device: torch.device, heads: int = 1) -> list[slice]:
    """Slices of positions for which the whole-vocabulary logits of `heads` LM heads are held at the same time."""
    if device.type != "cpu":
        room = XLA_HEAD_BYTES if device.type == "xla" else CUDA_HEAD_BYTES
        return _cut(positions, max(1, room // (heads * 4 * vocab)))
    step = max(1, HEAD_BYTES // (heads * dtype.itemsize * vocab))
    return _cut(positions, step, 2 ** (step.bit_length() - 1))


def strips_at_once(positions: int, vocab: int, dtype: torch.dtype) -> tuple[list[slice], list[slice]]:
    """Slices of positions, and the strips of the vocabulary in which the CPU computes the logits of each."""
    blocks = _cut(positions, POSITIONS)
    return blocks, _cut(vocab, max(1, STRIP_BYTES // (dtype.itemsize * max(1, -(-positions // len(blocks))))), 64)


def _cut(count: int, step: int, multiple: int = 1) -> list[slice]:
    """Slices of at most `step`: of similar size, or multiples of `multiple` if `step` is at least that large."""
    if multiple <= step:
        step -= step % multiple
    if multiple == 1:
        step = -(-count // max(1, -(-count // step)))
    return [slice(start, min(start + step, count)) for start in range(0, count, max(1, step))]
