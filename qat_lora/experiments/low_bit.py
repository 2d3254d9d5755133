"""Fine-tuning in low bits: latent weights are trained, and every forward pass uses them quantised.

Methods import what they need, so that --help does not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qat_lora.quant.targets import TargetOptions
from qat_lora.run import options as opt

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from qat_lora.quant.student import StudentSpec

TOKENS, BATCH = 8192, 4  # calibration tokens; rows per batch


@dataclass(frozen=True, kw_only=True)
class LowBitOptions(TargetOptions):
    """What a policy starts from; subclasses have `model`, `precision` and `seed`."""

    quantize: str = opt.quantiser(
        "none", "quantiser of the MLP and attention weights, e.g. int4/g32 [none, or those of --checkpoint]"
    )
    init: Literal["mse", "gptq", "own"] = opt.quantiser(
        "mse",
        "initial scales of --quantize: mse (least squared error) or gptq (mse, with error compensation); or own, the "
        "quantisers and scales of a low-bit --model",
    )
    checkpoint: str | None = opt.quantiser(
        None, "start from this student (a best.pt of train_qat.py), with its quantisers if --quantize names none",
        identity="start",
    )  # fmt: skip

    def student_spec(self) -> StudentSpec | None:
        """The quantisers, of --quantize or --target or else of --checkpoint or the model; None in full precision.
        Raises UserError unless --checkpoint was made from --model."""
        from qat_lora.export.own import own_spec
        from qat_lora.quant.spec import QuantSpec
        from qat_lora.quant.student import StudentSpec

        found = self.for_target("quantize").get("quantize", self.quantize)
        if self.init == "own":
            return own_spec(self.model, *["quantize"] * (found != "none"), *["checkpoint"] * bool(self.checkpoint))
        made = self._made()
        return StudentSpec(found, found) if QuantSpec.alternatives(found) else made

    def _made(self) -> StudentSpec | None:
        """The quantisers of --checkpoint."""
        from qat_lora.quant.student import StudentSpec, read_student

        return StudentSpec(**read_student(self.checkpoint, self.model)["spec"]) if self.checkpoint else None

    def empty_policy(self, spec: StudentSpec | None, name: str | None = None) -> nn.Module:
        """The model without values. spec: see `student_spec`. name: of a model, by default --model."""
        from qat_lora.models.loading import empty_model
        from qat_lora.quant.student import quantize

        model = empty_model(name or self.model)
        return quantize(model, spec) if spec else model

    def load_policy(self, spec: StudentSpec | None) -> nn.Module:
        """The model on the CPU. A student without scales is rounded to nearest until `set_scales`."""
        from qat_lora.export.own import own_student
        from qat_lora.models.loading import load_model
        from qat_lora.quant.calibration import load_start
        from qat_lora.quant.init import initialise

        if spec is None:
            return load_model(self.model)
        if self.init == "own":
            return own_student(self.model, spec)
        student, has_scales = load_start(self.checkpoint, self.model, spec, self.init == "gptq")
        if not has_scales:
            initialise(student, search=False)
        return student

    def set_scales(self, student: nn.Module, spec: StudentSpec | None, rows: Dataset) -> None:
        """Compute a student's scales by --init on the CPU, unless --checkpoint has set them. rows: its training rows,
        with `segments` or, at the targets, `mask`; their padding is left out."""
        from qat_lora.quant.calibration import calibrate

        if self.init != "own" and spec not in (None, self._made()):
            calibrate(student, self.init, _packed(rows, self.seed), self.precision)

    def start_facts(self, spec: StudentSpec | None) -> dict:
        """For the manifest: the quantisers and the checksum of the student that a run starts from."""
        from qat_lora.run.files import sha256

        found = {"student": str(spec)} if spec else {}
        return found | ({"start": sha256(Path(self.checkpoint))} if self.checkpoint else {})


def _packed(rows: Dataset, seed: int) -> list[dict]:
    """Batches {tokens [B, L]} of at most TOKENS tokens of rows of length L in random order, end to end and without
    their padding."""
    import torch

    from qat_lora.data.batches import epoch_order

    length, found = len(rows[0]["tokens"]), []
    for row in map(rows.__getitem__, epoch_order(seed, 0, len(rows))):
        real = row["segments"] > 0 if "segments" in row else row["mask"].flip(0).cummax(0).values.flip(0) > 0
        found.append(row["tokens"][real])
        if sum(map(len, found)) >= TOKENS:
            break
    tokens = torch.cat(found)[:TOKENS]
    length = min(length, len(tokens))
    kept = tokens[: len(tokens) // length * length].view(-1, length)
    batch = min(BATCH, len(kept))
    return [{"tokens": part} for part in kept.split(batch) if len(part) == batch]
