"""Teaches gguf 0.19 the block type Q2_0 (42), which llama.cpp and later releases of the library read and write.

A block is 64 weights (q − 1)·d: an fp16 d, then four integers q of 2 bits in each byte, the lowest bits first.
"""

import gguf.quants
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

NUMBER, WEIGHTS, BYTES = 42, 64, 18

if NUMBER not in GGMLQuantizationType._value2member_map_:
    member = int.__new__(GGMLQuantizationType, NUMBER)
    member._name_, member._value_ = "Q2_0", NUMBER
    GGMLQuantizationType._value2member_map_[NUMBER] = member
    GGML_QUANT_SIZES[member] = WEIGHTS, BYTES
    base = gguf.quants.__Quant  # inside the class the name would be mangled

    class Q2(base, qtype=member):  # registers itself
        @classmethod
        def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            """uint8 [blocks, 18] → fp32 [blocks, 64]."""
            d = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
            q = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & np.uint8(3)
            return d * (q.reshape(len(blocks), WEIGHTS).astype(np.float32) - 1)
