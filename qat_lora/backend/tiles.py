"""How large a piece of a computation a device likes."""

import torch

# Elements of a tile on the CPU: in fp32 they take 1 MB, so that a chain of operations stays in a core's cache instead
# of passing through memory once for each operation.
TILE = 2**18
# Logits of an LM head held at a time: on the CPU in the type of the product, elsewhere in fp32.
HEAD_BYTES = 128 * 2**20
ACCELERATOR_HEAD_BYTES = 256 * 2**20  # fewer, larger products and a smaller graph; not measured on hardware
STRIP_BYTES = 8 * 2**20  # logits of a strip of the vocabulary on the CPU
HEAD_TILE = 2**19  # of a strip: larger, since less is alive at the same time and much is done for each
POSITIONS = 2048  # of which the CPU takes all strips before it goes on


def tiles(rows: int, width: int, device: torch.device, size: int = TILE) -> list[slice]:
    """Slices that cut a matrix [rows, width] into tiles: of about `size` elements on the CPU, at least one row each;
    one tile elsewhere, where the compiler fuses operations (XLA) or a kernel wants all of the work at once (CUDA)."""
    step = rows if device.type != "cpu" else max(1, size // max(1, width))
    return _cut(rows, step)


def rows_at_once(positions: int, vocab: int, dtype: torch.dtype, device: torch.device, heads: int = 1) -> list[slice]:
    """Slices of positions whose logits over the whole vocabulary are held at the same time, of `heads` LM heads."""
    if device.type != "cpu":
        return _cut(positions, max(1, ACCELERATOR_HEAD_BYTES // (heads * 4 * vocab)))
    step = max(1, HEAD_BYTES // (heads * dtype.itemsize * vocab))
    return _cut(positions, step, 2 ** (step.bit_length() - 1))


def strips_at_once(
    positions: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[slice], list[slice]]:
    """Slices of positions, and the strips of the vocabulary in which the logits of each are computed."""
    if device.type != "cpu":
        return rows_at_once(positions, vocab, dtype, device), _cut(vocab, vocab)
    blocks = _cut(positions, POSITIONS)
    return blocks, _cut(vocab, max(1, STRIP_BYTES // (dtype.itemsize * max(1, -(-positions // len(blocks))))), 64)


def _cut(count: int, step: int, multiple: int = 1) -> list[slice]:
    """Slices of at most `step`: of like size, or of multiples of `multiple` where they can be so large."""
    if multiple <= step:
        step -= step % multiple
    if multiple == 1:
        step = -(-count // max(1, -(-count // step)))
    return [slice(start, min(start + step, count)) for start in range(0, count, max(1, step))]
