"""A model's identity: names and shapes of its tensors from the file headers, and a fingerprint of the content."""

import hashlib
import json
import os
import struct
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qat_lora.errors import UserError, first_line, one_line
from qat_lora.run.files import sha256

BLOCK = 2**24  # bytes read at a time
# Entries of a config.json that describe how it was written, not the model.
NOT_MODEL = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """One tensor of a safetensors file: its type and shape, and where its bytes are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def empty(self) -> Tensor:
        """A tensor of the same shape and type without storage; fp32 if torch has no such type."""
        return torch.empty(self.shape, dtype=DTYPES.get(self.dtype, torch.float32), device="meta")

    def may_equal(self, other: "Header") -> bool:
        """Whether two tensors may be equal: compares their bytes if they have the same type, otherwise True."""
        return self.dtype != other.dtype or all(a == b for a, b in zip(self.blocks(), other.blocks()))

    def blocks(self) -> Iterator[bytes]:
        """The tensor's bytes in blocks."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            for left in range(self.size, 0, -BLOCK):
                yield file.read(min(left, BLOCK))

    def digest(self) -> str:
        """sha256 (hex) of the tensor: type, shape and bytes."""
        digest = hashlib.sha256(json.dumps([self.dtype, self.shape]).encode())
        for block in self.blocks():
            digest.update(block)
        return digest.hexdigest()


def headers(files: list[Path]) -> dict[str, Header]:
    """The headers of the tensors in safetensors files, by tensor name. Raises UserError for a damaged file."""
    found = {}
    for path in files:
        try:
            with open(path, "rb") as file:
                length = struct.unpack("<Q", file.read(8))[0]
                if length > path.stat().st_size:
                    raise ValueError("truncated")
                table = json.loads(file.read(length))
            for name, entry in table.items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    found[name] = Header(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
                    if 8 + length + end > path.stat().st_size:
                        raise ValueError("truncated")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise UserError(f"{path} is damaged ({first_line(error)[:80]}); copy or download it again") from error
    return found


def check_pickle(path: Path) -> None:
    """Raise UserError unless a .bin file contains a dict of tensors by name and nothing else. Runs no code from it."""
    try:
        with warnings.catch_warnings():  # about other pickle protocols
            warnings.simplefilter("ignore")
            held = torch.load(path, map_location="meta", weights_only=True)
        if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
            raise ValueError("it does not hold tensors by name")
    except Exception as error:  # an arbitrary file may raise anything
        raise UserError(f"{path} is damaged ({one_line(error)}); copy or download it again") from error


def fingerprint(files: list[Path], config: dict, tokenizer: str) -> str:
    """sha256 (hex) of a model's content, independent of where it is stored.

    Covers the tensors with their names, shapes and types, however many safetensors files they are in; its config.json
    without the entries in NOT_MODEL; and its tokenizer's fingerprint. For .gguf and .bin files, covers every byte.
    """
    digest = hashlib.sha256(json.dumps([_model_part(config), tokenizer], sort_keys=True).encode())
    if all(path.suffix == ".safetensors" for path in files):
        stored = sorted(headers(files).items())
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases the GIL
            for (name, _), mark in zip(stored, pool.map(lambda item: item[1].digest(), stored)):
                digest.update(json.dumps([name, mark]).encode())
    else:
        for path in files:
            digest.update(sha256(path).encode())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer) -> str:
    """sha256 (hex) of all that determines token ids: the whole pipeline (normaliser, pre-tokenizer, vocabulary, merges,
    added tokens, post-processor) and the ids of BOS, EOS and UNK.

    Leaves out the chat template, which changes texts but not the token ids of a given text. Leaves out the pad token,
    which never occurs in packed rows; scripts set one for a model without it, which must not invalidate a cache.
    """
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    whole = [pipeline(tokenizer), special, tokenizer.split_special_tokens]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def pipeline(tokenizer) -> dict:
    """All that determines how a tokenizer splits texts.

    Fast: the JSON of the tokenizers library, without padding, truncation, empty settings of its model, and tokens
    beyond the embedding (see tokens.check_vocabulary), so that a .gguf file and a folder of the same model agree. Slow:
    the vocabulary, and the sha256 of its files.
    """
    if tokenizer.is_fast:
        whole, beyond = json.loads(tokenizer.backend_tokenizer.to_str()), getattr(tokenizer, "without_row", {})
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] not in beyond]
        whole["model"] = {key: value for key, value in whole["model"].items() if value not in (None, "")}
        return whole | {"padding": None, "truncation": None}
    with tempfile.TemporaryDirectory() as folder:
        files = tokenizer.save_vocabulary(folder)
        return {"vocab": tokenizer.get_vocab(), "files": [sha256(Path(file)) for file in sorted(files)]}


def _model_part(config):
    """A config.json's content without NOT_MODEL entries and null values."""
    if isinstance(config, dict):
        return {k: _model_part(v) for k, v in config.items() if k not in NOT_MODEL and v is not None}
    return [_model_part(value) for value in config] if isinstance(config, list) else config


def short(mark: str) -> str:
    """A fingerprint shortened for display."""
    return mark[:12]
