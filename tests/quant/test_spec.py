"""Quantiser specifications: parsing and printing, levels by value, and errors that say how to fix them."""

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec

SCALES = ("g32", "g128", "r1", "r8", "tensor")


@pytest.mark.parametrize("codebook", ["balanced", "int", "uniform"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("scale", SCALES)
def test_parsing_and_printing_round_trip(codebook, bits, scale):
    text = f"{codebook}{bits}/{scale}"
    spec = QuantSpec.parse(text)
    assert (spec.codebook, spec.bits) == (codebook, bits)
    assert str(spec) == text and QuantSpec.parse(str(spec)) == spec


def test_parsed_parts():
    assert QuantSpec.parse("balanced2/g32") == QuantSpec("balanced", 2, "group", 32)
    assert QuantSpec.parse("uniform4/r8") == QuantSpec("uniform", 4, "lowrank", 8)
    assert str(QuantSpec.parse("lut4/r8")) == "uniform4/r8", "lut is the earlier name of uniform"
    assert QuantSpec("lut", 4, "lowrank", 8) == QuantSpec("uniform", 4, "lowrank", 8)
    assert QuantSpec.parse("int8/tensor") == QuantSpec("int", 8, "tensor")
    assert QuantSpec.parse("none") is None


@pytest.mark.parametrize(
    "text",
    ["", "None", "balanced2", "balanced2/", "balanced5/g32", "balanced1/g32", "nf4/g32", "int4/32", "int4/g", "int4/r",
     "int4/g0", "int4/r0", "int4/g00", "int4/g-8", "int4/g3.5", " int4/g32", "int4/g32 ", "int4/g32\n", "int4/tensor8",
     "int4/g32r8", "INT4/g32"],
)  # fmt: skip
def test_a_bad_text_is_named_in_the_error(text):
    with pytest.raises(UserError) as error:
        QuantSpec.parse(text)
    assert repr(text) in str(error.value) and "balanced2/g32" in str(error.value)


@pytest.mark.parametrize("parts", [("nf", 4, "group", 32), ("int", 5, "group", 32), ("int", 4, "row", 32)])
def test_an_impossible_spec_fails_when_it_is_built(parts):
    with pytest.raises(UserError, match="codebooks"):
        QuantSpec(*parts)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_levels(bits):
    count = 2**bits
    expected = {
        "balanced": torch.arange(count) - (count - 1) / 2,
        "int": torch.arange(count) - 2.0 ** (bits - 1),
        "uniform": torch.linspace(-1, 1, count),
    }
    for codebook, values in expected.items():
        spec = QuantSpec(codebook, bits, "tensor")
        levels = spec.lowest + spec.step * torch.arange(spec.levels)
        torch.testing.assert_close(levels, values, rtol=0, atol=1e-6)
        assert spec.largest == values.abs().max()


def test_two_bit_levels_by_value():
    def levels(codebook):
        spec = QuantSpec(codebook, 2, "tensor")
        return [spec.lowest + spec.step * code for code in range(4)]

    assert levels("balanced") == [-1.5, -0.5, 0.5, 1.5]
    assert levels("int") == [-2, -1, 0, 1]
    assert levels("uniform") == pytest.approx([-1, -1 / 3, 1 / 3, 1])


def test_scale_values():
    assert QuantSpec.parse("int4/g32").scale_values(48, 64) == 96
    assert QuantSpec.parse("int4/r8").scale_values(48, 64) == 8 * (48 + 64 + 1)
    assert QuantSpec.parse("int4/tensor").scale_values(48, 64) == 1


def test_check_names_the_numbers_and_a_group_that_fits():
    with pytest.raises(
        UserError,
        match=r"mlp.up: 48 inputs are not divisible by group 32; use one of \[2, 3, 4, 6, 8, 12, 16, 24, 48\]",
    ):
        QuantSpec.parse("int4/g32").check("mlp.up", 64, 48)
    with pytest.raises(UserError, match=r"q: rank 33 exceeds the weight's 32; use a lower rank"):
        QuantSpec.parse("int4/r33").check("q", 32, 64)
    with pytest.raises(UserError, match=r"q: 48 inputs are not divisible by 32; use a group scale"):
        QuantSpec.parse("int4/r8").check("q", 64, 48)
    for fitting in ("int4/g16", "int4/tensor"):
        QuantSpec.parse(fitting).check("q", 64, 48)
    QuantSpec.parse("int4/r32").check("q", 32, 64)


def test_a_student_spec_that_quantises_nothing_is_refused():
    with pytest.raises(UserError, match="nothing would be quantised"):
        StudentSpec(mlp="none", attn="none", head="none")


@pytest.mark.parametrize("part", ["mlp", "attn", "head"])
def test_a_student_spec_with_a_bad_text_fails_when_it_is_built(part):
    with pytest.raises(UserError, match="int9/g32"):
        StudentSpec(**{part: "int9/g32"})
