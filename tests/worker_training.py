"""Training that test_launch.py and xla_workers.py run in every worker; a new process can import it."""

from pathlib import Path

from loops import train_qat
from safetensors.torch import load_file, save_file

from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.models.loading import empty_model, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session
from qat_lora.train.loop import Plan

SPEC = StudentSpec(mlp="balanced2/g32", attn="lut4/r4")
STEPS, GLOBAL_BATCH = 5, 4
CLOSE = 1e-6  # tolerance of weights after five steps in fp32


def train(backend, model: str, cache: str, out: Path, watch=lambda gradients: None) -> None:
    """Five steps of QAT with one global batch; every worker writes its weights. watch sees the reduced gradients."""
    student = quantize(load_model(model) if backend.is_main else empty_model(model), SPEC)
    if backend.is_main:
        initialise(student)
    backend.place(student)
    reduce = backend.reduce

    def watched(gradients):
        reduce(gradients)
        watch(gradients)

    backend.reduce = watched
    out.mkdir(exist_ok=True)
    session = Session(Run(out, resumed=False, writes=backend.is_main), backend, Every(log=1, save=0))
    plan = Plan(STEPS, GLOBAL_BATCH // backend.world_size, 1, 1e-4, warmup_steps=1, clip_grad_norm=0.1, seed=0)
    train_qat(student, KDCacheDataset(cache), plan, session, evaluate=lambda step: {})
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    save_file(backend.to_host(trained), out / f"worker{backend.rank}.safetensors")


def apart(one: Path, other: Path) -> float:
    """The largest difference between the weights that two workers wrote."""
    one, other = load_file(one), load_file(other)
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
