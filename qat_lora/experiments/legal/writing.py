"""The files of a fine-tuned model: its adapter, and the whole model with the adapter merged."""

import shutil
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import writes
from qat_lora.lora.adapter import adapter_values, save_adapter
from qat_lora.lora.merge import merged
from qat_lora.models.writing import write_model
from qat_lora.quant.student import StudentSpec, load_student, plain_model, save_student
from qat_lora.run.console import say
from qat_lora.run.files import new_folder, sha256


def base_of(cfg, spec: StudentSpec | None, base: nn.Module, rows: Dataset, path: Path, resumed: bool) -> nn.Module:
    """The model to train, on the CPU, with the scales of its quantisers. Under an adapter it is frozen, and kept in the
    student file `path`, from which a run is resumed. cfg: Config of train_cot_sft.py."""
    if spec is None or (resumed and cfg.method == "full"):  # whose values are in the checkpoint
        return base
    if path.exists():
        return load_student(path, cfg.model)[0]
    cfg.set_scales(base, spec, rows)
    if cfg.method != "full":
        save_student(path, base, cfg.model, spec, {"trained": cfg.checkpoint is not None})
    return base


def write_trained(
    model: nn.Module, name: str, spec: StudentSpec | None, folder: Path, tokenizer, tokens: Tensor,
    backend: TorchBackend,
) -> tuple[dict[str, Path | None], float | None]:  # fmt: skip
    """Write adapter/ if the model has an adapter, student.pt if its quantised weights were trained, and model/ in the
    format that transformers loads, replacing anything that an earlier process left there. Returns {what: path}, and the
    largest difference between the logits of adapter and model on `tokens`, see `lora.merge.merged`.

    name: the model before training. spec: its quantisers. folder: the run directory; its base.pt is the quantised base
    of an adapter. If the model is shared out, every worker calls this and worker 0 writes.
    """
    adapter, student, gap = None, None, None
    whole = folder / "model"
    if spec and not adapter_values(model):
        student = folder / "student.pt"
        save_student(student, model, name, spec, {"trained": True})
        model.to("meta")  # frees its memory
        trained = plain_model(load_student(student, name)[0]) if writes(model) else None
    else:
        checkpoint = folder / "base.pt" if spec else None
        adapter = folder / "adapter" if adapter_values(model) else None
        if adapter:
            save_adapter(model, adapter, sha256(checkpoint) if checkpoint else None)
        trained, gap = merged(model, name, checkpoint, adapter, tokens, backend)
    made = {"adapter": adapter, "student": student, "model": whole}
    if trained is None:
        return made, None
    if whole.is_file():
        whole.unlink()
    shutil.rmtree(whole, ignore_errors=True)
    with new_folder(whole) as part:
        write_model(trained, tokenizer, part, whole)
    if gap is not None:
        say(f"adapter and merged model differ by {gap:.1e} in a logit")
    return made, gap
