"""Export to Hugging Face's format, with baked weights level·scale in fp32, since fp16 would round them."""

from pathlib import Path

from qat_lora.export.source import Source, weight_of
from qat_lora.lora.adapter import load_adapter, weight_file, write_origin
from qat_lora.models.loading import load_tokenizer, plain_state
from qat_lora.models.writing import check_logits, probe, write_model
from qat_lora.run.files import read_json, sha256, write_json

ADAPTER_FOLDER = "adapter"


def hf_bytes(source: Source, merged: bool) -> int:
    """Bytes of the weights of an HF export, including a separate adapter, without the few kB of headers."""
    beside = weight_file(source.adapter).stat().st_size if source.adapter and not merged else 0
    return beside + sum(value.numel() * value.element_size() for value in plain_state(source.student).values())


def write_hf(source: Source, folder: Path, shown: Path, merged: bool) -> None:
    """Write model, tokenizer and generation config in HF's format, with the adapter merged into the weights or saved
    beside them.

    shown: the folder's final name, which the adapter's config gives as its base model.
    """
    student, tokenizer = source.student, load_tokenizer(source.name)
    if merged:
        state = plain_state(student) | {name: weight_of(source, name, True) for name in source.updates}
        write_model(student, tokenizer, folder, shown, state, source.adapted)
        return
    back = write_model(student, tokenizer, folder, shown)
    if source.adapter:
        write_adapter(source, folder / ADAPTER_FOLDER, shown)
        adapted = load_adapter(back, folder / ADAPTER_FOLDER, source.checkpoint)
        check_logits(adapted, probe(back), source.adapted, shown / ADAPTER_FOLDER)


def write_adapter(source: Source, folder: Path, base: Path) -> None:
    folder.mkdir()
    file = weight_file(source.adapter)
    (folder / file.name).write_bytes(file.read_bytes())
    config = read_json(source.adapter / "adapter_config.json")
    write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": str(base.absolute())})
    write_origin(folder, sha256(source.checkpoint), source.student)
