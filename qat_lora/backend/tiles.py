"""How large a piece of an elementwise computation a device likes."""

import torch

# Elements of a tile on the CPU: in fp32 they take 1 MB, so that a chain of operations stays in a core's cache instead
# of passing through memory once for each operation.
TILE = 2**18


def tiles(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices that cut a matrix [rows, width] into tiles: of about TILE elements on the CPU, at least one row each; one
    tile elsewhere, where the compiler fuses operations (XLA) or a kernel wants all of the work at once (CUDA)."""
    step = rows if device.type != "cpu" else max(1, TILE // max(1, width))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, max(1, step))]
