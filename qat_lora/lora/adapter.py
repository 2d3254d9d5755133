"""LoRA adapters in PEFT's own format, on a base model or a frozen student."""

import math
import re
import shutil
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor, nn

from qat_lora.backend.devices import on_host
from qat_lora.backend.sharding import whole_values, writes
from qat_lora.errors import UserError, one_line
from qat_lora.models.architecture import unwrap
from qat_lora.models.identity import check_pickle, short
from qat_lora.models.loading import EMBEDDED, empty_model, load_model
from qat_lora.quant.student import empty_student, load_student, read_student
from qat_lora.run.files import read_json, sha256, write_json, writing

ORIGIN = "origin.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# LoRA settings that determine the size and the place of B·A, and settings that do not affect the result. An adapter
# with any other setting switched on is more than B·A on a frozen base.
SIZE = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
PLACE = {
    "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
}  # fmt: skip
SILENT = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "init_lora_weights", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
BEYOND_PRODUCT = {"use_dora", "lora_bias", "bias"}  # they work in PEFT, but cannot be exported
STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # these initialise A and B only; others change the base


class Dropout(nn.Dropout):
    """Dropout that on a CPU draws 16 random bits per value, four values at once; its probability is rounded to a
    multiple of 2⁻¹⁶. torch's own dropout took a quarter of the time of a LoRA step there (docs/benchmarks.md)."""

    def forward(self, x: Tensor) -> Tensor:
        if not on_host(x) or not self.training or not self.p:
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        bits = words.view(torch.int16)[: x.numel()].view(x.shape)
        dropped = min(round(self.p * 2**16), 2**16 - 1)
        return x * ((bits >= dropped - 2**15).to(x.dtype) * (1 / (1 - dropped / 2**16)))


def load_adapter(model: nn.Module, path: str | Path, checkpoint: str | Path | None = None) -> nn.Module:
    """Load the LoRA of a PEFT folder onto `model`, in place; nothing in the result is trainable.

    checkpoint: the student file that the model was read from, if any. Call it while the model is on the CPU. Raises
    UserError if the folder is missing, damaged or not a plain LoRA, if it was trained on another student, if its
    tensors are not exactly the model's, and if it changes the LM head: losses and figures here use only the head's
    weight and would ignore the change.
    """
    folder = Path(path).expanduser()
    saved = read_adapter(folder)
    _check_origin(folder, checkpoint, model)
    _check_places(folder, saved, unwrap(model))
    try:
        with warnings.catch_warnings():  # PEFT only warns about missing tensors; they are refused below
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
    except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"adapter {folder} does not fit the model ({one_line(error)}); use the model of its run"
        ) from error
    odd = sorted(saved.keys() ^ get_peft_model_state_dict(adapted, save_embedding_layers=False).keys())
    if odd:
        raise UserError(
            f"adapter {folder} does not fit the model: {odd[0]} is in only one of them; use the model of its run"
        )
    return adapted.requires_grad_(False)


def take_values(model: nn.Module, path: str, checkpoint: str | Path | None) -> None:
    """Copy the values of a saved adapter into a new one of the same rank, alpha and layers; the model is on the CPU.
    Raises UserError if they differ, or if the folder is damaged or belongs to another student."""
    folder = Path(path).expanduser()
    saved, new = read_adapter(folder), get_peft_model_state_dict(model, save_embedding_layers=False)
    _check_origin(folder, checkpoint, model)
    there, here = read_json(folder / "adapter_config.json"), model.peft_config["default"]
    for name in sorted(SIZE, reverse=True):
        if there.get(name) != getattr(here, name):
            raise UserError(
                f"adapter {folder} has {name} {there.get(name)}, and this run {getattr(here, name)}; use the adapter's"
            )
    odd = sorted(saved.keys() ^ new.keys())
    if odd:
        raise UserError(
            f"adapter {folder} has other layers: {odd[0]} is in only one of them; use the adapter's --targets"
        )
    set_peft_model_state_dict(model, saved)


def adapter_values(model: nn.Module) -> int:
    """The number of values in the LoRA adapters attached to a model; 0 without one."""
    return sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The adapter's tensors. Checks for missing files, which PEFT would look for on the hub."""
    if not folder.is_dir():
        raise UserError(
            f"adapter {folder}: no such folder; train_recovery_lora.py writes adapter/ into its run directory"
        )
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None or not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"adapter {folder} is not a PEFT folder: adapter_config.json or {WEIGHT_FILES[0]} is missing; "
            "use the adapter/ of a run directory"
        )
    _check_config(folder, read_json(folder / "adapter_config.json"))
    if file.suffix == ".bin":
        check_pickle(file)
    try:
        return load_peft_weights(str(folder), device="cpu")
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"adapter {folder}: {file.name} is damaged ({one_line(error)}); copy or train it again"
        ) from error


def _check_places(folder: Path, saved: dict[str, Tensor], base: nn.Module) -> None:
    """Raise UserError for an adapter of the LM head or the embedding."""
    tables = {id(base.get_output_embeddings()): "LM head", id(base.get_input_embeddings()): "embedding"}
    for name, module in base.named_modules():
        if id(module) in tables and any(re.search(rf"(^|\.){re.escape(name)}\.", key) for key in saved):
            raise UserError(
                f"adapter {folder} changes {name}, the model's {tables[id(module)]}, which is not supported; train one "
                "without it"
            )


def _check_config(folder: Path, config: dict) -> None:
    """Raise UserError unless the adapter is a LoRA on an unchanged base: other changes that PEFT makes while loading
    would be missing from an export, or applied twice."""
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA" or task not in (None, "CAUSAL_LM"):
        raise UserError(
            f"adapter {folder}: peft_type {kind} with task_type {task} is not supported; use a LoRA with CAUSAL_LM"
        )
    alpha, start = config.get("lora_alpha", 8), config.get("init_lora_weights", True)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
        raise UserError(
            f"adapter {folder}: lora_alpha {alpha} is not a finite number other than 0; correct it, or leave the "
            "adapter out"
        )
    if start not in STARTS:
        raise UserError(
            f"adapter {folder}: init_lora_weights {start!r} changes the base model whenever it is loaded; convert it "
            "to a plain LoRA by saving it with PEFT's path_initial_model_for_weight_conversion"
        )
    for name in sorted(config.keys() - SIZE - PLACE - SILENT - BEYOND_PRODUCT):
        if config[name]:
            value = str(config[name])[:60]
            raise UserError(f"adapter {folder}: {name} {value} is not supported; train a plain LoRA without it")


def write_origin(folder: Path, student: str | None, model: nn.Module | None = None) -> None:
    """Record next to a saved adapter what it belongs to (`student`: sha256 of the student file, None for a plain base
    model; the fingerprint of the base `model`, if it has one) and its own checksums."""
    sums = {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.name.startswith("adapter_")}
    base = None if model is None else getattr(unwrap(model), "fingerprint", None)
    write_json(folder / ORIGIN, {"student": student, "base": base, "sha256": sums})


def _check_origin(folder: Path, checkpoint: str | Path | None, model: nn.Module) -> None:
    """Raise UserError if an adapter has changed or belongs to another model. Adapters from elsewhere have no
    record and pass."""
    if not (folder / ORIGIN).is_file():
        return
    origin = read_json(folder / ORIGIN)
    sums = origin.get("sha256")
    if not isinstance(sums, dict) or not sums:
        raise UserError(f"adapter {folder}: {ORIGIN} is damaged; copy the folder again, or delete that file")
    for name, wanted in sums.items():
        if not (folder / name).is_file():
            raise UserError(f"adapter {folder}: {name}, which training saved, is missing; copy or train it again")
        if sha256(folder / name) != wanted:
            raise UserError(f"adapter {folder}: {name} has changed since training (checksum); copy or train it again")
    if origin.get("student") != (sha256(Path(checkpoint)) if checkpoint else None):
        there = f"another student, not {checkpoint}" if checkpoint else "a quantised student, not on the base model"
        raise UserError(f"adapter {folder} was trained on {there}; use the --checkpoint of its run")
    trained, here = origin.get("base"), getattr(unwrap(model), "fingerprint", None)
    if trained and here and trained != here:
        raise UserError(
            f"adapter {folder} was trained on another model (fingerprint {short(trained)}), not {model.name_or_path!r} "
            f"({short(here)}); use the --model of its run"
        )


def save_adapter(model: nn.Module, folder: Path, student: str | None) -> None:
    """Write the adapter in PEFT's own format, with the sha256 of the student file that it belongs to; the folder is
    replaced as a whole. If the model is shared out, every worker calls this and worker 0 writes."""
    # On the host, since safetensors cannot read an XLA tensor. The embedding is never trained here; "auto" would query
    # the hub for it.
    weights = whole_values(model, lambda name, _: "lora_" in name)
    if not writes(model):
        return
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    try:
        with writing(folder):
            if old.exists() and not folder.exists():  # killed between the two renames below
                old.rename(folder)
            shutil.rmtree(part, ignore_errors=True)
            model.save_pretrained(part, save_embedding_layers=False, state_dict=weights)
            config = read_json(part / "adapter_config.json")  # PEFT writes sets in arbitrary order
            lists = {name: sorted(value) for name, value in config.items() if isinstance(value, list)}
            write_json(part / "adapter_config.json", dict(sorted((config | lists).items())))
            write_origin(part, student, model)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def weight_file(folder: Path) -> Path:
    return next(folder / name for name in WEIGHT_FILES if (folder / name).is_file())


def load_trained(model: str | None, checkpoint: str | Path | None, adapter: str | Path | None) -> tuple[nn.Module, str]:
    """A base model (the embedded one unless `model` names another), or the student of a checkpoint, with an adapter if
    one is given; and the name of the base, for its tokenizer."""
    if checkpoint:
        whole, made = load_student(checkpoint, model)
        name = made["model"]
    else:
        name = model or EMBEDDED
        whole = load_model(name)
    return load_adapter(whole, adapter, checkpoint) if adapter else whole, name


def empty_trained(model: str | None, checkpoint: str | Path | None) -> nn.Module:
    """The model that `load_trained` gives without an adapter, but without storage."""
    return empty_student(read_student(checkpoint, model)) if checkpoint else empty_model(model or EMBEDDED)
