"""Fine-tuning in low bits: latent weights are trained, and every forward pass uses them quantised.

Methods import what they need, so that --help does not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qat_lora.run import options as opt

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from qat_lora.backend import TorchBackend
    from qat_lora.quant.student import StudentSpec

ROWS, BATCH = 32, 4  # of the training text, for the start


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
        from qat_lora.quant.student import StudentSpec, read_student

        made = StudentSpec(**read_student(self.checkpoint, self.model)["spec"]) if self.checkpoint else None
        return StudentSpec(self.quantize, self.quantize) if QuantSpec.alternatives(self.quantize) else made

    def empty_policy(self, name: str | None = None) -> nn.Module:
        """The model without values. name: of a model, by default --model."""
        from qat_lora.kernels.norms import norms_in_one_step
        from qat_lora.models.loading import empty_model
        from qat_lora.quant.student import freeze_plain_tables, quantize

        model, spec = empty_model(name or self.model), self.student_spec()
        return quantize(model, spec) if spec else norms_in_one_step(freeze_plain_tables(model))

    def open_policy(self, rows: Dataset | None, backend: TorchBackend) -> nn.Module:
        """The model, whose embedding and LM head are not trained, on the CPU. rows: its training text, from which the
        scales are computed; unused in full precision."""
        from qat_lora.data.batches import first_batches
        from qat_lora.kernels.norms import norms_in_one_step
        from qat_lora.models.loading import load_model
        from qat_lora.quant.calibration import calibrate, load_start
        from qat_lora.quant.student import freeze_plain_tables

        spec = self.student_spec()
        if spec is None:
            return norms_in_one_step(freeze_plain_tables(load_model(self.model)))
        student, has_scales = load_start(self.checkpoint, self.model, spec, self.init == "gptq")
        if not has_scales:
            calibrate(
                student, self.init, first_batches(rows, ROWS, min(BATCH, len(rows)), self.seed), backend.precision
            )
        return student

    def start_facts(self) -> dict:
        """For the manifest: the quantisers and the checksum of the student that a run starts from."""
        from qat_lora.run.files import sha256

        spec = self.student_spec()
        found = {"student": str(spec)} if spec else {}
        return found | ({"start": sha256(Path(self.checkpoint))} if self.checkpoint else {})
