"""The script leaves a complete, checked export or nothing; the dry run's plan is accurate; bad input gives one line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from forked import kill
from gguf import GGUFReader
from locked import locked
from small import full_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora.errors import UserError
from qat_lora.export import gguf
from qat_lora.export.card import licence
from qat_lora.export.targets import LAYOUTS
from qat_lora.lora.adapter import write_origin
from qat_lora.models.loading import load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize, read_student, save_student
from qat_lora.run.files import sha256

SPEC = StudentSpec(mlp="int2/g64", attn="balanced4/g32")


@pytest.fixture(scope="module")
def files(tiny_model_dir, make_adapter, tmp_path_factory):
    """(a trained student file, its adapter). Do not write to them."""
    folder = tmp_path_factory.mktemp("files")
    model = quantize(load_model(str(tiny_model_dir)), SPEC)
    initialise(model)
    save_student(folder / "best.pt", model, str(tiny_model_dir), SPEC, {"step": 7, "heldout_ppl": 9.5})
    shutil.copytree(make_adapter(tiny_model_dir), folder / "adapter")
    write_origin(folder / "adapter", sha256(folder / "best.pt"))
    return folder / "best.pt", folder / "adapter"


@pytest.fixture
def export(run, files, tmp_path, capsys):
    """export(*flags): export the student to tmp_path/out and return the printed lines."""

    def main(*flags) -> list[str]:
        run("export_model", "--checkpoint", files[0], "--output-dir", tmp_path / "out", *flags)
        return capsys.readouterr().out.splitlines()

    return main


@pytest.fixture
def refused(refusal, files, tmp_path):
    """refused(*flags): the error; nothing is exported."""

    def main(*flags) -> str:
        said = refusal("export_model", "--checkpoint", files[0], "--output-dir", tmp_path / "out", *flags)
        assert not (tmp_path / "out").exists() and not (tmp_path / ".out.part").exists()
        return said

    return main


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- exports ---------------------------------------------------------------------------------------------------------
def test_gguf_with_its_adapter(export, files, tmp_path):
    lines = export("--adapter", files[1])
    out = tmp_path / "out"
    assert names(out) == ["README.md", "adapter.gguf", "export.json", "model.gguf"] and names(tmp_path) == ["out"]
    types = {"embedding, head —": "F16", "attention balanced4/g32": "Q4_1", "mlp int2/g64": "Q2_0"}
    types |= {"norms, biases —": "F32"}
    table = [" ".join(line.split()) for line in lines if " tensors" in line]
    wanted = [*(f"{part} {kind}" for part, kind in types.items()), "adapter — F32 8 tensors"]
    assert len(table) == len(wanted) and all(map(str.startswith, table, wanted))
    assert "Q4_1 8 tensors" in table[1] and "Q2_0 6 tensors" in table[2]
    note = json.loads((out / "export.json").read_text())
    for name, sizes in note["bytes"].items():
        assert sizes["written"] == sizes["computed"] == (out / name).stat().st_size
    assert note["bytes"].keys() == {"model.gguf", "adapter.gguf"}
    assert note["types"] == types
    attention, mlp = 2 * (2 * 64 * 64 + 2 * 32 * 64), 2 * 3 * 64 * 128
    assert note["bits_per_weight"] == pytest.approx((5 * attention + 2.25 * mlp) / (attention + mlp), rel=1e-12)
    assert note["student_bits_per_weight"] == pytest.approx((4.5 * attention + 2.25 * mlp) / (attention + mlp))
    assert (note["format"], note["adapter_as"], note["quantisers"]) == ("gguf", "lora", vars(SPEC))
    assert note["student"] == sha256(files[0]) and note["info"]["step"] == 7
    assert note["adapter"] == sha256(files[1] / "adapter_model.safetensors")
    assert re.fullmatch(r"[0-9a-f]{7,}( with changes)?|nogit", note["commit"])


def test_merging_reports_the_added_size(export, files, tmp_path):
    lines = export("--adapter", files[1], "--adapter-as", "merged")
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == types["blk.1.ffn_down.weight"] == "F16"
    assert types["blk.0.attn_k.weight"] == "Q4_1" and types["blk.0.ffn_up.weight"] == "Q2_0"
    more = 2 * (64 * 64 * (16 - 5) + 128 * 64 * (16 - 2.25)) / 8e6
    assert any(f"merging adds {more:.2f} MB" in line for line in lines)
    assert names(tmp_path / "out") == ["README.md", "export.json", "model.gguf"]


@pytest.mark.parametrize("kind", ["hf", "merged"])
def test_hf_folder(export, files, tmp_path, kind):
    lines = export("--adapter", files[1], "--format", kind)
    out = tmp_path / "out"
    assert (out / "adapter").is_dir() == (kind == "hf")
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(names(out))
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    note = json.loads((out / "export.json").read_text())
    assert note["adapter_as"] == ("lora" if kind == "hf" else "merged")
    sizes = note["bytes"]["weights"]
    assert sizes["written"] == sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    assert sizes["written"] == pytest.approx(sizes["computed"], rel=0.05)  # 47 names in a tiny file
    assert any("read back" in line for line in lines)


@pytest.mark.parametrize("flags", [["--format", "hf"], ["--format", "gguf"], ["--gguf-type", "F16"]])
def test_dry_run_prints_the_size_and_writes_nothing(export, tmp_path, flags):
    said = export(*flags, "--dry-run")
    plan, formats = said[: said.index("")], said[said.index("") + 2 :]
    assert names(tmp_path) == []
    assert plan == export(*flags)[: len(plan)]
    assert re.search(r"[\d.]+ MB", plan[-1])
    assert [line.split(":")[0].strip() for line in formats] == ["hf", "gguf", *LAYOUTS]


def test_the_output_folder_may_be_empty_or_deeply_nested(export, tmp_path):
    (tmp_path / "out").mkdir()
    export()
    export("--output-dir", tmp_path / "a" / "b" / "c")
    for out in (tmp_path / "out", tmp_path / "a" / "b" / "c"):
        assert names(out) == ["README.md", "export.json", "model.gguf"]


@pytest.mark.parametrize("kind, loads", [("gguf", "lora_path="), ("hf", "/adapter"), ("merged", "pipeline(")])
def test_the_model_card_says_what_the_run_measured_and_how_to_load_it(export, files, tmp_path, kind, loads):
    export("--format", kind, "--adapter", files[1])
    _, head, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    head, note = yaml.safe_load(head), json.loads((tmp_path / "out" / "export.json").read_text())
    assert head["license"] == "unknown" and kind in head["tags"] and head["base_model"] in note["model"]
    assert f"| {note['bits_per_weight']:.3f} in these files |" in text and note["commit"] in text
    assert loads in text and "| quantisers | mlp=int2/g64 attn=balanced4/g32 head=none |" in text


@pytest.mark.parametrize(
    "card, found",
    [("---\nlicense: mit\n---\n# A model\n", "mit"), ("# A model\n", "unknown"), ("---\n: [\n---\n", "unknown"),
     ("---\ntags: []\n---\n", "unknown")],
)  # fmt: skip
def test_the_licence_is_that_of_the_base(tmp_path, card, found):
    (tmp_path / "README.md").write_text(card)
    assert licence(str(tmp_path)) == found
    assert licence("smollm2-135m") == "apache-2.0"


# -- errors ----------------------------------------------------------------------------------------------------------
def test_an_export_that_reads_back_differently_is_deleted(export, tmp_path, monkeypatch):
    encode = gguf.encode

    def faulty(kind, spec, parts):
        data = encode(kind, spec, parts)
        data[-1, -1] ^= 1
        return data

    monkeypatch.setattr(gguf, "encode", faulty)
    with pytest.raises(UserError, match="changed between writing and reading back, so it is not kept"):
        export()
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_full_disk_leaves_nothing(export, tmp_path, kind):
    with full_disk(60_000), pytest.raises(UserError, match="could not be written"):
        export("--format", kind)
    assert names(tmp_path) == []
    export("--format", kind)


def test_a_killed_export_leaves_no_output_folder_and_the_next_one_succeeds(forks, export, files, tmp_path):
    flags = ["--checkpoint", files[0], "--output-dir", tmp_path / "out"]
    forks.execute("export_model", *flags, death=kill("export.gguf.write_gguf", 1, after=True))
    assert names(tmp_path) == [".out.part"]
    export()
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["README.md", "export.json", "model.gguf"]


def test_existing_outputs_are_not_overwritten_and_missing_options_are_named(refusal, export, files, tmp_path):
    export()
    before = (tmp_path / "out" / "model.gguf").read_bytes()
    flags = ["--checkpoint", files[0], "--output-dir"]
    assert "already exists and nothing is overwritten" in refusal("export_model", *flags, tmp_path / "out")
    assert (tmp_path / "out" / "model.gguf").read_bytes() == before
    assert "already exists" in refusal("export_model", *flags, files[0])
    assert "--checkpoint is missing" in refusal("export_model", "--output-dir", "x")
    assert "--output-dir is missing" in refusal("export_model", *flags[:2])
    with locked(tmp_path / ".new.part"), pytest.raises(UserError, match="another process is writing"):
        export("--output-dir", tmp_path / "new")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--gguf-type", "IQ4_NL"], "--gguf-type 'IQ4_NL' is not one of auto, TQ1_0, TQ2_0, Q2_0"),
        (["--format", "merged"], "needs the --adapter"),
        (["--adapter-as", "merged"], "is for --format gguf with an"),
        (["--format", "hf", "--gguf-type", "Q4_0"], "--gguf-type Q4_0 is for --format gguf"),
        (["--gguf-type", "Q4_0"], "Q4_0 cannot hold model.layers.0.self_attn.q_proj, which is balanced4/g32"),
        (["--gguf-type", "Q2_0"], "use Q4_1, Q5_0, Q5_1, Q8_0, F16, or auto"),
    ],
)
def test_bad_flags(refused, flags, words):
    assert words in refused(*flags)


def test_an_untrained_student_is_refused(refused, files, tmp_path):
    torch.save(read_student(files[0]) | {"info": {"step": 0, "trained": False}}, tmp_path / "raw.pt")
    said = refused("--checkpoint", tmp_path / "raw.pt")
    assert "is untrained" in said and "step 0" in said


def test_a_model_in_full_precision_becomes_f16(run, refusal, tiny_model_dir, tmp_path, capsys):
    run("export_model", "--model", tiny_model_dir, "--output-dir", tmp_path / "out")
    assert "in full precision" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["student"] is None and record["bits_per_weight"] == 16
    here, there = (load_model(str(path)) for path in (tiny_model_dir, tmp_path / "out" / "model.gguf"))
    for name, value in here.state_dict().items():
        assert torch.equal(there.state_dict()[name], value.half().float() if value.ndim > 1 else value), name
    for flags in (["--format", "hf"], ["--gguf-type", "Q4_0"], ["--adapter", "runs/adapter"]):
        said = refusal("export_model", "--model", tiny_model_dir, "--output-dir", tmp_path / "other", *flags)
        assert " ".join(flags[:2]) in said or flags[0] in said
    assert "or --model FOLDER" in refusal("export_model", "--output-dir", tmp_path / "other")


class Hub:
    """Stands in for the hub: one repository is there, and another cannot be written."""

    def __init__(self):
        self.uploaded = {}

    def whoami(self):
        return {"name": "me"}

    def repo_exists(self, name):
        return name == "me/there"

    def create_repo(self, name, private):
        if name == "me/full":
            raise OSError("quota exceeded")
        assert private
        return f"hub/{name}"

    def upload_folder(self, repo_id, folder_path):
        self.uploaded[repo_id] = sorted(path.name for path in folder_path.iterdir())


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    monkeypatch.setattr("qat_lora.export.hub.HfApi", lambda: made)
    return made


def test_an_export_is_pushed_to_the_hub_with_a_card_that_loads_it_from_there(hub, export, tmp_path):
    assert "uploaded to hub/me/q4" in export("--push-to-hub", "me/q4")
    assert hub.uploaded == {"me/q4": ["README.md", "export.json", "model.gguf"]}
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'folder = snapshot_download("me/q4")' in card and 'Llama(f"{folder}/model.gguf")' in card
    assert str(tmp_path / "out") not in card.partition("To load it")[2]


def test_a_failed_upload_keeps_the_export_and_says_how_to_upload_it(hub, export, tmp_path):
    with pytest.raises(UserError, match=r"was not uploaded \(quota exceeded\); run hf upload me/full"):
        export("--push-to-hub", "me/full")
    assert names(tmp_path / "out") == ["README.md", "export.json", "model.gguf"]


def test_a_repository_that_is_there_or_a_hub_out_of_reach_is_refused_before_writing(
    hub, refused, tmp_path, monkeypatch
):
    assert "--push-to-hub me/there is there already" in refused("--push-to-hub", "me/there")
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # refuses the connection
    assert "--push-to-hub me/q4: " in refused("--push-to-hub", "me/q4")
    assert not (tmp_path / "out").exists()
