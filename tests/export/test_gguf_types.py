"""Codes and scales survive GGUF's blocks bit for bit, and other readers see the same values."""

import gguf
import numpy as np
import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.export import gguf_types
from qat_lora.export.gguf_types import TYPES, choose, decode, encode, fitting
from qat_lora.quant.linear import Quantizer
from qat_lora.quant.spec import QuantSpec

OUT, IN = 6, 512
KINDS = {  # a quantiser of each type
    "TQ1_0": "ternary/g256", "TQ2_0": "ternary/g256", "Q2_0": "int2/g64", "Q4_0": "int4/g32", "Q4_1": "balanced4/g32",
    "Q5_0": "int5/g32", "Q5_1": "int5/g32+offset", "Q8_0": "int8/g32",
    **{f"Q{bits}_K": f"q{bits}_k" for bits in range(2, 7)},
}  # fmt: skip
SPECS = [
    *KINDS.values(),
    "ternary/g64",
    "ternary/tensor",
    "int4/g32+offset",
    "int2/g64+offset",
    "int2/g32/s6x256",
    "int4/g64+offset/s4",
    "int5/g32/s8",
    "int2/rows2",
] + [
    f"{codebook}{bits}/{scale}"
    for codebook, bits in [("balanced", b) for b in (2, 3, 4)] + [("int", b) for b in (2, 3, 4, 8)]
    for scale in ("g32", "g64", "g128", "tensor")
]
FLAT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"]
PAIRS = [(text, kind) for text in SPECS for kind in fitting(QuantSpec.parse(text), IN)[:-1]]


def random_quantizer(text: str) -> Quantizer:
    """Random codes, and scales that include the smallest one and, if the codebook allows them, negative ones."""
    spec, random = QuantSpec.parse(text), torch.Generator().manual_seed(0)
    quantizer = Quantizer(spec, OUT, IN)
    scale = torch.randn(quantizer.scale.shape, generator=random)
    scale.view(-1)[0] = 1e-9
    quantizer.scale.data = scale if spec.codebook == "int" and not spec.offset else scale.abs()
    if spec.offset:
        quantizer.offset.data = -torch.rand(scale.shape, generator=random)
    for name, parameter in quantizer.named_parameters():
        if "reach" in name:
            parameter.data = torch.full_like(parameter, 1.7)
    quantizer.codes = torch.randint(spec.levels, (OUT, IN), generator=random, dtype=torch.uint8)
    return quantizer


def values_of_q2_0(data: np.ndarray) -> np.ndarray:
    """Decoded by hand: a block is its step d, and 16 bytes of four weights each, lowest bits first."""
    blocks = data.reshape(OUT, -1, 18)
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    fours = [(blocks[..., 2:] >> 2 * k) % 4 - 1.0 for k in range(4)]
    return (np.stack(fours, axis=3).reshape(OUT, -1, 64) * d).reshape(OUT, IN)


@pytest.mark.parametrize("text, kind", PAIRS)
def test_codes_scales_and_offsets_come_back_bit_for_bit(text, kind):
    quantizer = random_quantizer(text)
    parts, spec = quantizer.parts(), quantizer.spec
    data = encode(kind, spec, parts)
    assert data.dtype == np.uint8 and data.shape == (OUT, gguf_types.row_bytes(kind, IN))
    codes, scale, offset = decode(kind, spec, data)
    each = np.repeat(parts.scale, scale.shape[1] // parts.scale.shape[1], axis=1)
    assert (codes == parts.codes).all() and (scale == each).all()
    assert (offset is None) == (kind not in ("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"))
    if spec.offset:
        assert (offset == np.repeat(parts.offset, offset.shape[1] // parts.offset.shape[1], axis=1)).all()
    elif offset is not None:
        assert (offset == (each * np.float32(spec.lowest)).astype(np.float16)).all()


@pytest.mark.parametrize("text, kind", PAIRS)
def test_another_reader_sees_the_students_weights(text, kind):
    """gguf's own dequantiser (Q2_0, which it lacks, by hand) against Quantizer.decode."""
    quantizer = random_quantizer(text)
    data = encode(kind, quantizer.spec, quantizer.parts())
    seen = values_of_q2_0(data) if kind == "Q2_0" else gguf.dequantize(data, gguf_types.library_type(kind))
    expected = quantizer.decode(quantizer.codes).numpy()
    rounded = kind in ("Q4_1", "Q5_1") and quantizer.spec.codebook == "balanced"  # its offset, once
    scale = np.abs(quantizer.parts().scale).max()
    assert np.abs(seen - expected).max() <= (scale * abs(quantizer.spec.lowest) * 2**-11 if rounded else 0)


@pytest.mark.parametrize("kind", gguf_types.QUANTISED)
def test_a_flipped_bit_anywhere_is_detected(kind):
    """decode gives another code, scale or offset for every single bit of a block; in TQ1_0 some bytes are alike."""
    quantizer = random_quantizer(KINDS[kind])
    data = encode(kind, quantizer.spec, quantizer.parts())[1:2, : TYPES[kind].bytes]
    whole, missed = decode(kind, quantizer.spec, data), 0
    for bit in range(8 * TYPES[kind].bytes):
        flipped = data.copy()
        flipped[0, bit // 8] ^= 1 << bit % 8
        read = decode(kind, quantizer.spec, flipped)
        missed += not any(a is not None and a.tobytes() != b.tobytes() for a, b in zip(whole, read))
    assert missed <= (16 if kind == "TQ1_0" else 0)


@pytest.mark.parametrize("integer", range(16))
def test_an_integer_without_a_code_gives_an_invalid_code(integer):
    """balanced2 in Q4_0 uses 5, 7, 9 and 11 only."""
    spec = QuantSpec.parse("balanced2/g32")
    data = np.full((1, 18), integer * 17, np.uint8)
    data[0, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    code = int(decode("Q4_0", spec, data).codes[0, 0])
    assert (code in range(4)) == (integer in (5, 7, 9, 11))


@pytest.mark.parametrize(
    "text, width, types",
    [
        ("int2/g64", 128, ["Q2_0", *FLAT]), ("int2/g32", 128, FLAT), ("int2/tensor", 192, ["Q2_0", *FLAT]),
        ("int2/tensor", 48, ["F16"]), ("int2/g16", 128, ["F16"]), ("balanced2/g64", 128, FLAT),
        ("balanced4/g32", 128, ["Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16"]), ("int4/g96", 192, FLAT),
        ("int5/g32", 128, ["Q5_0", "Q5_1", "Q8_0", "F16"]), ("balanced5/g32", 128, ["Q5_1", "Q8_0", "F16"]),
        ("int8/g32", 128, ["Q8_0", "F16"]), ("balanced8/g32", 128, ["F16"]), ("lut4/g32", 128, ["F16"]),
        ("int4/r8", 128, ["F16"]),
    ],
)  # fmt: skip
def test_types_that_fit(text, width, types):
    spec = QuantSpec.parse(text)
    assert fitting(spec, width) == types
    assert choose("w", spec, width, "auto") == types[0]
    for kind in types:
        assert choose("w", spec, width, kind) == kind


@pytest.mark.parametrize(
    "text, width, kind, words",
    [
        ("int2/g32", 128, "Q2_0", ["its blocks hold 64 weights", "use Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F16, or auto"]),
        ("balanced2/g64", 128, "Q2_0", ["it cannot represent the levels of balanced2", "Q4_0"]),
        ("int2/tensor", 96, "Q2_0", ["96 inputs are not divisible by its block size 64", "Q4_0"]),
        ("int4/r8", 128, "Q4_0", ["one scale per block, not one per weight", "use F16"]),
    ],
)
def test_a_type_that_does_not_fit_is_refused_by_name(text, width, kind, words):
    with pytest.raises(UserError) as error:
        choose("layers.0.mlp.up_proj", QuantSpec.parse(text), width, kind)
    for word in [f"--gguf-type {kind}", "layers.0.mlp.up_proj", text, *words]:
        assert word in str(error.value)
