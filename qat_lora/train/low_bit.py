"""Fine-tuning in low bits: latent weights are trained, and every forward pass uses them quantised.

Methods import what they need, so that --help does not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qat_lora.run import options as opt

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from qat_lora.quant.student import StudentSpec

TOKENS, BATCH = 8192, 4  # of the training rows, for the start; rows that are read at a time


@dataclass(frozen=True, kw_only=True)
class LowBitOptions:
    """What a policy starts from; subclasses have `model` and `seed`."""

    quantize: str = opt.quantiser(
        "none", "train MLP and attention on the levels of this quantiser, e.g. int4/g32; none: in full precision"
    )
    init: Literal["mse", "gptq"] = opt.quantiser(
        "gptq", "initial scales of --quantize: mse (least squared error) or gptq (mse, with error compensation)"
    )
    checkpoint: str | None = opt.quantiser(
        None, "start from this student (a best.pt of train_qat.py), on its own quantisers unless --quantize differs",
        identity="start",
    )  # fmt: skip

    def student_spec(self) -> StudentSpec | None:
        """The quantisers; None in full precision. Raises UserError unless --checkpoint was made from --model."""
        from qat_lora.quant.spec import QuantSpec
        from qat_lora.quant.student import StudentSpec

        made = _spec_of(self.checkpoint, self.model) if self.checkpoint else None
        return StudentSpec(self.quantize, self.quantize) if QuantSpec.alternatives(self.quantize) else made

    def empty_policy(self, name: str | None = None) -> nn.Module:
        """The model without values. name: of a model, by default --model."""
        from qat_lora.models.loading import empty_model
        from qat_lora.quant.student import quantize

        model, spec = empty_model(name or self.model), self.student_spec()
        return quantize(model, spec) if spec else model

    def load_policy(self) -> nn.Module:
        """The model on the CPU. Unless it is a student whose scales are set, it is rounded to nearest until
        `set_scales`."""
        from qat_lora.models.loading import load_model
        from qat_lora.quant.calibration import load_start
        from qat_lora.quant.init import initialise

        spec = self.student_spec()
        if spec is None:
            return load_model(self.model)
        student, has_scales = load_start(self.checkpoint, self.model, spec, self.init == "gptq")
        if not has_scales:
            initialise(student, search=False)
        return student

    def set_scales(self, student: nn.Module, rows: Dataset, precision: str) -> None:
        """Compute the scales of a student on the CPU, by --init, from the tokens of its training rows."""
        from qat_lora.data.batches import first_batches
        from qat_lora.quant.calibration import calibrate

        if self.student_spec() not in (None, self.checkpoint and _spec_of(self.checkpoint, self.model)):
            count = max(1, min(len(rows), TOKENS // len(rows[0]["tokens"])))
            calibrate(student, self.init, first_batches(rows, count, min(BATCH, count), self.seed), precision)

    def start_facts(self) -> dict:
        """For the manifest: the quantisers and the checksum of the student that a run starts from."""
        from qat_lora.run.files import sha256

        spec = self.student_spec()
        found = {"student": str(spec)} if spec else {}
        return found | ({"start": sha256(Path(self.checkpoint))} if self.checkpoint else {})


@cache
def _spec_of(checkpoint: str, model: str) -> StudentSpec:
    """The quantisers of a student file, which must have been made from the model."""
    from qat_lora.quant.student import StudentSpec, read_student

    return StudentSpec(**read_student(checkpoint, model)["spec"])
