"""Rows of a GGUF file in a model's own order."""

import numpy as np


def from_gguf_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_gguf_rows`."""
    if not heads:
        return rows
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
