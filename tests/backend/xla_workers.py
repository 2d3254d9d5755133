"""Run by test_workers.py: N workers on N of torch_xla's CPU devices, through the project's own launch.

PJRT_DEVICE=CPU CPU_NUM_DEVICES=N python tests/backend/xla_workers.py N MODEL_DIR CACHE_DIR OUT_DIR [unreduced]

torch_xla runs CPU devices as threads of one process. Threads that reach a graph at the same time each compile an
executable of their own, and the collectives of different executables never meet. Here the threads enter the step marker
one after another: the next as soon as the one before has its executable, for it may run in the marker until the others'
collectives arrive. For tests alone: it replaces a private function.
"""

import sys
import threading
import time
from pathlib import Path

import torch_xla
import torch_xla.debug.metrics as met
from safetensors.torch import save_file

from qat_lora.backend import launch
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.models.loading import empty_model, load_model
from qat_lora.qat import Plan, train_qat
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session

COUNT, MODEL, CACHE, OUT = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
UNREDUCED = sys.argv[5:] == ["unreduced"]
SPEC = StudentSpec(mlp="balanced2/g32", attn="lut4/r4")
STEPS, GLOBAL_BATCH = 5, 4

_marker, _turn, _everyone = torch_xla._XLAC._xla_step_marker, threading.Lock(), threading.Barrier(COUNT)
_building = threading.Lock()  # transformers switches global defaults while it builds a model


def _step_marker(device, devices, wait=False, reset_scope=True):
    _turn.acquire()
    returned = threading.Event()
    threading.Thread(target=_pass_on, args=(_executables(), returned)).start()
    _marker(device, devices, wait=False, reset_scope=reset_scope)
    returned.set()
    _everyone.wait()


def _pass_on(before: int, returned: threading.Event) -> None:
    while _executables() == before and not returned.wait(0.01):
        pass
    time.sleep(0.05)  # it is counted before it is put where the others find it
    _turn.release()


def _executables() -> int:
    compiled = met.metric_data("CompileTime")
    return (met.counter_value("CachedCompile") or 0) + (compiled[0] if compiled else 0)


torch_xla._XLAC._xla_step_marker = _step_marker


def worker(backend, out: Path) -> None:
    with _building:
        student = quantize(load_model(MODEL) if backend.is_main else empty_model(MODEL), SPEC)
        if backend.is_main:
            initialise(student)
    backend.place(student)
    graphs, reduce = [], backend.reduce

    def watched(tensors):
        if not UNREDUCED:
            reduce(tensors)
        graphs.append(torch_xla._XLAC._get_xla_tensors_hlo(tensors))

    backend.reduce = watched
    run = Run(out / "run", resumed=False, writes=backend.is_main)
    session = Session(run, backend, Every(log=1, save=0))
    plan = Plan(
        steps=STEPS, batch_size=GLOBAL_BATCH // backend.world_size, accumulation=1, learning_rate=1e-4, warmup_steps=1,
        clip_grad_norm=0.1, seed=0,
    )  # fmt: skip
    train_qat(student, KDCacheDataset(CACHE), plan, 1e-4, session, backend, evaluate=lambda step: {})
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    save_file(backend.to_host(trained), out / f"worker{backend.rank}.safetensors")
    (out / f"graphs{backend.rank}.txt").write_text("\n\n".join(graphs))


if __name__ == "__main__":
    (OUT / "run").mkdir()
    launch(worker, (OUT,), "xla", "fp32", COUNT)
