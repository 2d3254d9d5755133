"""Quantiser specifications: parsing and printing, levels by value, and errors that say how to fix them."""

import itertools

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec

CODEBOOKS, BITS = ("balanced", "int", "uniform"), (2, 3, 4, 5, 8)


def test_parsing_gives_the_parts_and_printing_the_text():
    scales = {"g128": ("group", 128), "r8": ("lowrank", 8), "tensor": ("tensor",)}
    for codebook, bits, scale in itertools.product(CODEBOOKS, BITS, scales):
        spec = QuantSpec.parse(text := f"{codebook}{bits}/{scale}")
        assert spec == QuantSpec(codebook, bits, *scales[scale]) and str(spec) == text
    assert str(QuantSpec.parse("lut4/r8")) == "uniform4/r8", "lut is the earlier name of uniform"
    assert QuantSpec("lut", 4, "lowrank", 8) == QuantSpec("uniform", 4, "lowrank", 8)
    assert QuantSpec.parse("none") is None


@pytest.mark.parametrize(
    "text",
    ["", "None", "balanced2", "balanced9/g32", "nf4/g32", "int4/32", "int4/g", "int4/g00", "int4/r0", "int4/g3.5",
     " int4/g32", "int4/g32\n", "int4/tensor8", "int4/g32r8", "INT4/g32"],
)  # fmt: skip
def test_a_bad_text_is_named_in_the_error(text):
    with pytest.raises(UserError) as error:
        QuantSpec.parse(text)
    assert repr(text) in str(error.value) and "balanced2/g32" in str(error.value)


@pytest.mark.parametrize("parts", [("nf", 4, "group", 32), ("int", 9, "group", 32), ("int", 4, "row", 32)])
def test_an_impossible_spec_fails_when_it_is_built(parts):
    with pytest.raises(UserError, match="codebooks"):
        QuantSpec(*parts)


@pytest.mark.parametrize("bits", BITS)
def test_levels(bits):
    count = 2**bits
    expected = {
        "balanced": torch.arange(count) - (count - 1) / 2,  # 2 bits: −1.5, −0.5, 0.5, 1.5
        "int": torch.arange(count) - 2.0 ** (bits - 1),  # 2 bits: −2, −1, 0, 1
        "uniform": torch.linspace(-1, 1, count),
    }
    for codebook, values in expected.items():
        spec = QuantSpec(codebook, bits, "tensor")
        levels = spec.lowest + spec.step * torch.arange(spec.levels)
        torch.testing.assert_close(levels, values, rtol=0, atol=1e-6)
        assert spec.largest == values.abs().max()


@pytest.mark.parametrize(
    "text, bits",
    [
        ("int4/g32", 96 * 16), ("int4/r8", 8 * (48 + 64 + 1) * 16), ("int4/tensor", 16), ("int4/rows8", 6 * 16),
        ("int4/g32+offset", 2 * 96 * 16), ("int4/g32/s8", 96 * 8 + 48 * 16), ("int4/g16/s6x32", 192 * 6 + 96 * 16),
        ("int2/g16+offset/s4x64", 2 * (192 * 4 + 48 * 16)), ("int4/g32+zero", 96 * (16 + 4)),
    ],
)  # fmt: skip
def test_the_bits_of_scales_and_offsets(text, bits):
    assert QuantSpec.parse(text).scale_bits(48, 64) == bits


@pytest.mark.parametrize(
    "name, bits",
    [
        ("q2_k", 2.625), ("q3_k", 3.4375), ("q4_k", 4.5), ("q5_k", 5.5), ("q6_k", 6.5625), ("q4_0", 4.5), ("q4_1", 5),
        ("q8_0", 8.5), ("q2_0", 2.25),
    ],
)  # fmt: skip
def test_the_grids_of_llama_cpp_have_its_bits(name, bits):
    spec = QuantSpec.parse(name)
    assert QuantSpec.parse(str(spec)) == spec == QuantSpec.parse(name.upper())
    assert (spec.code_bits(512 * 64) + spec.scale_bits(64, 512)) / (512 * 64) == bits


@pytest.mark.parametrize(
    "text, said",
    [("balanced4/g32+offset", "leave out .offset"), ("int4/tensor+offset", "leave out .offset"),
     ("ternary/g64+zero", "leave out .zero"), ("int4/g64+zero/s8", "leave out /s"),
     ("int4/r8/s8", "leave out /s"), ("int4/g48/s6x256", "not a whole number of groups of 48; use e.g. x384")],
)  # fmt: skip
def test_a_combination_that_no_format_has_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        QuantSpec.parse(text)


@pytest.mark.parametrize(
    "text, shape, said",
    [
        ("int4/g32", (64, 48), r"48 inputs are not divisible by group 32; use one of \[2, 3, 4, .*, 24, 48\]"),
        ("int4/r33", (32, 64), "rank 33 exceeds the weight's 32; use a lower rank"),
        ("int4/r8", (64, 48), "48 inputs are not divisible by 32; use a group scale"),
        ("q2_k", (64, 576), "576 inputs are not divisible by 256, the block of int2/g16.offset/s4x256; use another"),
        ("int4/rows8", (60, 48), r"60 outputs are not divisible by 8 rows; use one of \[1, 2, .*, 60\]"),
    ],
)
def test_check_names_the_numbers_and_a_size_that_fits(text, shape, said):
    with pytest.raises(UserError, match=f"mlp.up: {said}"):
        QuantSpec.parse(text).check("mlp.up", *shape)
    for fitting in ("int4/g16", "int4/tensor"):
        QuantSpec.parse(fitting).check("q", 64, 48)
    QuantSpec.parse("int4/r32").check("q", 32, 64)


def test_a_student_spec_that_quantises_nothing_or_has_a_bad_text_fails_when_it_is_built():
    with pytest.raises(UserError, match="nothing would be quantised"):
        StudentSpec(mlp="none", attn="none", head="none")
    for part in ("mlp", "attn", "head"):
        with pytest.raises(UserError, match="int9/g32"):
            StudentSpec(**{part: "int9/g32"})
