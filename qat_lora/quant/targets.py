"""Which quantisers a reader of low-bit models holds exactly and runs fast, for --target."""

from qat_lora.errors import UserError

# By target and bits: alternatives, of which each layer gets the first that fits its shape.
HELD = {
    "llama.cpp": {
        2: "q2_k|q2_0|q4_0", 3: "q3_k|q4_0", 4: "q4_k|q4_0", 5: "q5_k|q8_0", 6: "q6_k|q8_0", 8: "q8_0"
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
