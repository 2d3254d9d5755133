"""What a model's name refers to: a package's file, a .gguf file, a local folder, or a hub repository."""

import functools
import hashlib
import json
import re
import tempfile
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from qat_lora.errors import UserError, first_line
from qat_lora.models.packaged import PACKAGED, packaged_file

# One probe without retries: the hub's own client retries for 23 s (measured) before it reports a missing network.
PROBE_SECONDS = 8
GIVE = f"give a model folder, a .gguf file, a hub name, {' or '.join(PACKAGED)}"
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json", "vocab.txt",
    "spiece.model", "tiktoken.model",
)  # fmt: skip
# Files besides weights and config that determine how a prompt is encoded and when generation stops.
SPEECH = (
    *TOKENIZERS, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
# Files that describe how weights are quantised if config.json does not.
QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def model_source(name: str) -> dict:
    """The from_pretrained arguments for a model name: one of PACKAGED, a local folder or .gguf file, or a hub name.
    Their local paths are absolute."""
    if name in PACKAGED:
        return _gguf_arguments(packaged_file(name))
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        return {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"model {name!r}: no such file; {GIVE}")
        return _gguf_arguments(path)
    if path.is_file():
        raise UserError(f"model {name!r} is a file, but not a .gguf file; {GIVE}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"model {name!r}: no such folder; {GIVE}")
    return {"pretrained_model_name_or_path": name}


def _gguf_arguments(path: Path) -> dict:
    return {"pretrained_model_name_or_path": _alone(path), "gguf_file": path.name}


@functools.cache
def _folder_for_links() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="qat_lora_gguf_")  # removed when the process ends


@functools.cache
def _alone(path: Path) -> str:
    """A folder with only a link to `path`. Otherwise transformers would also read a tokenizer_config.json, a chat
    template or an adapter of another model in the same folder."""
    folder = Path(tempfile.mkdtemp(dir=_folder_for_links().name))
    (folder / path.name).symlink_to(path)
    return str(folder)


def is_hub(name: str) -> bool:
    """Whether a name is a hub repository. Raises UserError for a path that does not exist."""
    return model_source(name)["pretrained_model_name_or_path"] == name and not Path(name).is_absolute()


def absolute_name(name: str) -> str:
    """A model's name with a local path made absolute."""
    path = Path(name).expanduser().absolute()
    return str(path) if name not in PACKAGED and path.exists() else name


@functools.lru_cache
def hub_fault(kind: str, name: str) -> str | None:
    """Why the hub cannot provide the "model" or "dataset" `name` (no network, not found), or None if it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError

    try:
        getattr(HfApi(), f"{kind}_info")(name, timeout=PROBE_SECONDS)
    except RepositoryNotFoundError:
        return f"no such {kind}, or no access to it"
    except (HTTPError, OSError, ValueError) as error:
        return first_line(error)
    return None


def file_of(name: str, file: str) -> Path | None:
    """A file of a folder or hub model, downloaded if necessary; None if it does not exist."""
    if not is_hub(name):
        path = Path(model_source(name)["pretrained_model_name_or_path"], file)
        return path if path.is_file() else None
    try:
        offline = hub_fault("model", name) is not None
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, local_files_only=offline)
    except (OSError, ValueError):
        return None  # from_pretrained reports the reason
    return Path(found) if found else None


def weight_files(name: str) -> list[Path]:
    """A model's weight files. Raises UserError if there are none, or if an index is damaged or lists a missing
    file."""
    source = model_source(name)
    if "gguf_file" in source:
        return [Path(source["pretrained_model_name_or_path"], source["gguf_file"]).resolve()]
    for file in WEIGHTS:
        path = file_of(name, file)
        if path and path.suffix != ".json":
            return [path]
        if path:
            table = _read(path, name).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(shard, str) for shard in table.values()):
                raise UserError(f"model {name!r}: {file} is damaged (no weight_map); copy it again")
            shards = {shard: file_of(name, shard) for shard in sorted(set(table.values()))}
            missing = [shard for shard, there in shards.items() if there is None]
            if missing:
                raise UserError(f"model {name!r}: {missing[0]}, listed in {file}, is missing; copy the model again")
            return list(shards.values())
    raise UserError(f"model {name!r} has no weights (model.safetensors); give a complete model")


def speech_files(name: str) -> dict[str, str]:
    """sha256 (hex) of each SPEECH file in a model's folder, by file name; for JSON files, of the content regardless of
    its formatting. Empty for a GGUF file, which contains all of this itself."""
    if "gguf_file" in model_source(name):
        return {}
    found = {file: path for file in SPEECH if (path := file_of(name, file))}
    return {file: hashlib.sha256(_bare(path.read_bytes())).hexdigest() for file, path in found.items()}


def _bare(data: bytes) -> bytes:
    try:
        content = json.loads(data)
    except ValueError:
        return data
    if isinstance(content, dict):
        content.pop("transformers_version", None)
    return json.dumps(content, sort_keys=True).encode()


def own_tokens(name: str) -> set[str]:
    """The tokens in a model's tokenizer.json; empty if there is no such file."""
    path = None if "gguf_file" in model_source(name) else file_of(name, "tokenizer.json")
    if path is None:
        return set()
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = held["model"]["vocab"]  # for Unigram, a list of [token, score]
        tokens = vocabulary if isinstance(vocabulary, dict) else [token for token, _ in vocabulary]
        return {*tokens, *(token["content"] for token in held["added_tokens"])}
    except (OSError, ValueError, KeyError, TypeError):  # loading the tokenizer reports the fault
        return set()


def files_key(name: str) -> tuple:
    """Cache key of a model's files: changes with their sizes and times. Reads no contents."""
    source = model_source(name)
    folder = source["pretrained_model_name_or_path"]
    if is_hub(name):
        return (folder,)
    files = sorted(file for file in Path(folder).iterdir() if file.is_file())
    stats = [(file.name, (there := file.stat()).st_size, there.st_mtime_ns) for file in files]
    return (folder, source.get("gguf_file"), *stats)


def config_json(name: str) -> dict:
    """The content of a folder's or hub model's config.json; {} for a GGUF file and for a hub model without one."""
    if "gguf_file" in model_source(name):
        return {}
    path = file_of(name, "config.json")
    if path is None and not is_hub(name):
        raise UserError(f"model {name!r} is not a model: the folder has no config.json; {GIVE}")
    return _read(path, name) if path else {}


def _read(path: Path, name: str) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"model {name!r}: {path.name} is damaged ({first_line(error)[:80]}); copy it again") from error
    if not isinstance(content, dict):
        raise UserError(f"model {name!r}: {path.name} is damaged (not a JSON object); copy it again")
    return content


def check_source(name: str) -> None:
    """Raise UserError for anything but a self-contained model: for an adapter (even with a model in the same folder),
    an architecture that transformers does not know, or one that comes with its own Python code."""
    if "gguf_file" in model_source(name):
        if (part := PART.search(name)) and int(part[2]) > 1:
            raise UserError(
                f"model {name!r} is part {int(part[1])} of {int(part[2])} of a .gguf file; join the parts with "
                "llama.cpp's llama-gguf-split --merge, or give the model as a folder"
            )
        return
    if file_of(name, "adapter_config.json"):
        if file_of(name, "config.json") is None:
            raise UserError(
                f"model {name!r} is an adapter, not a model; give its base as --model, and this folder as --adapter"
            )
        raise UserError(
            f"model {name!r} contains a full model and an adapter (adapter_config.json); move the adapter_* files to "
            "another folder, then give just the model, or also that folder as --adapter"
        )
    config = config_json(name)
    kind = config.get("model_type")
    if not config or (isinstance(kind, str) and kind in CONFIG_MAPPING):
        return
    if config.get("auto_map"):
        raise UserError(
            f"model {name!r} is of type {kind!r} and needs its own Python code (auto_map), which is never run here; "
            "give a model that transformers supports"
        )
    if not kind:
        raise UserError(f"model {name!r}: its config.json has no model_type; give a complete model")
    raise UserError(
        f"model {name!r} is of type {kind!r}, which transformers {transformers.__version__} does not know; update "
        "transformers, or give another model"
    )


def stored_quantised(name: str) -> str | None:
    """The method by which a model's weights are quantised, or the key or file that shows that they are; None if they
    are not. Of a hub model, only config.json is looked at."""
    config = config_json(name)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("quantization_config", "compression_config", "quantization"):
            if held := part.get(key):
                return str(held.get("quant_method", key) if isinstance(held, dict) else key)
    return next((file for file in QUANTISED if not is_hub(name) and file_of(name, file)), None)


PUBLISHED = Path(__file__).with_name("published")  # the sizes of the models that presets name


def planned_name(name: str) -> str:
    """Where the config of a model is: `name` itself, or our own copy of its sizes if the hub cannot be reached."""
    copy = PUBLISHED / name.replace("/", "--")
    unreachable = (
        name not in ("", ".") and (copy / "config.json").is_file() and is_hub(name) and hub_fault("model", name)
    )
    return str(copy) if unreachable else name


def is_planned(name: str) -> bool:
    """Whether a model is one of our copies, which have no weights."""
    return Path(name).parent == PUBLISHED


class PlannedTokenizer:
    """Stands in for a tokenizer: encodes every text as the token 0, and decodes every token to nothing."""

    eos_token_id, chat_template, added_tokens_decoder = 0, "none", {}

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": [0]}

    def decode(self, tokens: list[int], **options) -> str:
        return ""

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[dict], **options) -> str:
        return ""
