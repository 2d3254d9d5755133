"""Which quantisers a reader of low-bit models holds exactly and runs fast, for --target."""

from dataclasses import dataclass, fields
from typing import Literal

from qat_lora.errors import UserError
from qat_lora.run import options as opt
from qat_lora.run.options import RunConfig

# By target and bits: alternatives, of which each layer gets the first that fits its shape.
HELD = {
    "llama.cpp": {
        2: "q2_k|q2_0|q4_0", 3: "q3_k|q4_0", 4: "q4_k|q4_0", 5: "q5_k|q5_0", 6: "q6_k|q8_0", 8: "q8_0"
    },
    "vllm": {bits: f"int{bits}/g64|int{bits}/g32" for bits in (2, 3, 4, 8)},
    "mlx": {bits: f"int{bits}/g64+offset|int{bits}/g32+offset" for bits in (2, 3, 4, 5, 6, 8)},
    "hf": {bits: f"balanced{bits}/g32" for bits in range(2, 9)},
}  # fmt: skip
FORMATS = {"llama.cpp": "gguf", "vllm": "compressed-tensors", "mlx": "mlx", "hf": "hf"}  # of export_model.py


def picked(target: str, bits: float) -> str:
    """The quantiser for a target, as --mlp takes it; raises UserError with the bits that the target holds."""
    held = HELD[target]
    if bits not in held:
        raise UserError(
            f"--bits {bits:g}: {target} holds {', '.join(map(str, held))}; use one of these, or share bits over layers "
            "with allocate_bits.py"
        )
    return held[bits]


@dataclass(frozen=True, kw_only=True)
class TargetOptions(RunConfig):
    target: Literal[*HELD] | None = opt.quantiser(
        None, "reader to train for: picks quantisers, layer by layer, from what it holds exactly at --bits"
    )
    bits: float | None = opt.quantiser(None, "bits of a weight for --target [4]", at_least=2, at_most=8)

    def for_target(self, *names: str) -> dict[str, str]:
        """The values that --target gives the options `names`; {} without one. Raises UserError if they are given, too,
        or if there are --bits without a target."""
        if not self.target:
            if self.bits:
                raise UserError(
                    f"--bits {self.bits:g} is for a --target; give one, or a quantiser such as --{names[0]} int4/g32; "
                    "allocate_bits.py shares bits over layers"
                )
            return {}
        found, usual = picked(self.target, self.bits or 4), {field.name: field.default for field in fields(self)}
        for name in names:
            if (given := getattr(self, name)) not in (found, usual[name]):
                raise UserError(f"--target {self.target} picks --{name}; leave out --{name} {given}, or --target")
        return dict.fromkeys(names, found)
