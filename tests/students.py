"""Students that tests train, measure and write."""

from torch import nn

from qat_lora.models.loading import load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize


def student_of(model, spec: StudentSpec) -> nn.Module:
    """An untrained student of a model, which is changed, or of the model in a folder."""
    student = quantize(model if isinstance(model, nn.Module) else load_model(str(model)), spec)
    initialise(student)
    return student
