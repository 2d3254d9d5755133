"""The published network: its number of weights, its names and shapes, and reading and refusing its checkpoints."""

import pytest
import torch
import yaml

from qat_lora.errors import UserError
from qat_lora.experiments.athena.evaluation import load_run, starting_model
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.published import SIZES, kind_of, load_state, read_state, state_of
from qat_lora.run.command_line import parse

ARCH = {
    "hidden_size": 16, "num_heads": 4, "L_layers": 2, "H_cycles": 2, "L_cycles": 3, "expansion": 4, "mlp_t": True,
    "puzzle_emb_len": 2, "halt_max_steps": 5, "pos_encodings": "none", "no_ACT_continue": True, "H_layers": 0,
}  # fmt: skip
FACE = "_orig_mod.model."  # what torch.compile and the loss head put before the names
TABLE = "inner.puzzle_emb.weights"


def spec_of(**changes) -> RecursiveSpec:
    sizes = {name: ARCH[name] for name in (*SIZES, "L_layers", "mlp_t")} | {"hidden_size": 16, "identifiers": 3}
    return RecursiveSpec(11, 81, **(sizes | changes))


def model_of(**changes) -> RecursiveModel:
    torch.manual_seed(0)
    model = RecursiveModel(spec_of(**changes))
    for tensor in model.state_dict().values():
        tensor.normal_()
    return model


def published(folder, model: RecursiveModel, wrap=None, **arch):
    path = folder / "step_7"
    state = {FACE + name: tensor for name, tensor in state_of(model).items()}
    torch.save(state if wrap is None else {wrap: state, "step": 7}, path)
    (folder / "all_config.yaml").write_text(yaml.safe_dump({"arch": ARCH | arch, "seed": 0}))
    return path


# -- the network -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, vocab, length, weights", [
    ([], 11, 81, 5_028_866),  # Sudoku-Extreme
    (["arch.mlp_t=false"], 12, 900, 6_829_058),  # ARC
])  # fmt: skip
def test_preset_trm_has_the_published_number_of_weights(words, vocab, length, weights, load_script):
    script = load_script("pretrain")
    cfg = parse(script.Config, "pretrain", ["--config", "trm", *words])
    sizes = {name: getattr(cfg, name) for name in vars(spec_of()) if hasattr(cfg, name)}
    spec = RecursiveSpec(vocab, length, **sizes)
    assert spec.parameters == weights == sum(p.numel() for p in RecursiveModel(spec).parameters())


def test_names_and_shapes_of_the_published_checkpoint_for_arc():
    model = RecursiveModel(RecursiveSpec(12, 900, puzzle_emb_len=16, identifiers=5))
    layer = {
        "self_attn.qkv_proj.weight": (1536, 512), "self_attn.o_proj.weight": (512, 512),
        "mlp.gate_up_proj.weight": (3072, 512), "mlp.down_proj.weight": (512, 1536),
    }  # fmt: skip
    layers = {f"inner.L_level.layers.{at}.{name}": shape for at in (0, 1) for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in state_of(model).items()} == layers | {
        "inner.H_init": (512,), "inner.L_init": (512,), "inner.embed_tokens.embedding_weight": (12, 512),
        "inner.lm_head.weight": (12, 512), "inner.q_head.weight": (2, 512), "inner.q_head.bias": (2,),
        TABLE: (5, 512),
    }  # fmt: skip


# -- reading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [None, "model"])
@pytest.mark.parametrize("form", [{}, {"mlp_t": False}])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, wrap, form):
    model = model_of(**form)
    path = published(tmp_path, model, wrap, **form, **({"pos_encodings": "rope"} if form else {}))
    found, kind, segments = load_run(path)
    assert segments == 5 and kind == "sudoku9" == kind_of(found.spec) and found.spec.identifiers == 3
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert load_run(path, 80)[0].spec.length == 80 if form else True  # attention takes rows of any length


def test_without_puzzle_emb_len_the_embedding_takes_the_positions_that_it_fills(tmp_path):
    model = model_of(puzzle_emb_len=3, puzzle_emb_ndim=40)
    found = load_run(published(tmp_path, model, puzzle_emb_len=0))[0]
    assert found.spec == model.spec


def test_a_run_starts_from_a_checkpoint_and_other_puzzles_start_from_the_mean(tmp_path, capsys):
    model = model_of()
    path = str(published(tmp_path, model))
    assert torch.equal(starting_model(path, spec_of()).identity, model.identity)
    other = starting_model(path, spec_of(identifiers=7))
    torch.testing.assert_close(other.identity, model.identity.mean(0).expand(7, -1))
    assert torch.equal(other.head, model.head)
    assert "3 puzzle embeddings there, 7 here: all start as their mean" in capsys.readouterr().out


# -- refusing --------------------------------------------------------------------------------------------------------
def test_another_network_is_refused_with_the_names_and_shapes_that_differ(tmp_path):
    path = str(published(tmp_path, model_of()))
    with pytest.raises(UserError) as caught:
        starting_model(path, spec_of(hidden_size=32, L_layers=1))
    said = str(caught.value)
    assert said.startswith(f"--start {path} is a checkpoint of another network: inner.H_init is (16,) there and (32,)")
    assert "more" in said and "\n" not in said
    with pytest.raises(UserError, match=r"mlp_t.down_proj.weight is \(83, 256\) there and absent here"):
        load_state(model_of(mlp_t=False), read_state(tmp_path / "step_7"), "it")


@pytest.mark.parametrize("change, said", [
    ({"pos_encodings": "learned", "mlp_t": False}, "arch.pos_encodings is 'learned'; only 'rope' is supported"),
    ({"no_ACT_continue": False}, "arch.no_ACT_continue is False; only True is supported"),
])  # fmt: skip
def test_forms_that_we_lack_are_refused_by_name(tmp_path, change, said):
    path = published(tmp_path, model_of(mlp_t=change.get("mlp_t", True)), **change)
    with pytest.raises(UserError, match=said):
        load_run(path)


def test_without_its_sizes_a_checkpoint_is_refused_with_what_is_missing(tmp_path):
    path = published(tmp_path, model_of())
    (tmp_path / "all_config.yaml").write_text("arch: {hidden_size: 16}")
    with pytest.raises(UserError, match=r"does not give the sizes of step_7 .*it needs arch: with num_heads"):
        load_run(path)
    (tmp_path / "all_config.yaml").unlink()
    with pytest.raises(UserError, match="No such file"):
        load_run(path)


@pytest.mark.parametrize("arch, said", [
    ({"expansion": "4"}, "arch.expansion is '4', not a number from 1 to"),
    ({"halt_max_steps": 0}, "arch.halt_max_steps is 0, not a number from 1 to 10,000; fix it"),
    ({"num_heads": [2]}, r"arch.num_heads is \[2\]"), ({"H_cycles": 10**9}, "arch.H_cycles is 1000000000"),
    ({"L_cycles": True}, "arch.L_cycles is True"), ({"puzzle_emb_len": 1.5}, "arch.puzzle_emb_len is 1.5"),
])  # fmt: skip
def test_impossible_sizes_are_refused_by_name(tmp_path, arch, said):
    with pytest.raises(UserError, match=said):
        load_run(published(tmp_path, model_of(), **arch))


class Runs:
    """Unpickling it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_pickle_is_not_run_and_other_files_are_refused(tmp_path):
    path, trace = tmp_path / "step_1.pt", tmp_path / "trace"
    torch.save({"inner.H_init": Runs(trace)}, path)
    with pytest.raises(UserError, match="is not a PyTorch checkpoint of plain tensors"):
        read_state(path)
    assert not trace.exists()
    path.write_bytes(b"PK damaged")
    with pytest.raises(UserError, match="is not a PyTorch checkpoint"):
        read_state(path)
    for content in ({"head": torch.zeros(2)}, {"model": None}, {1: torch.zeros(1)}, [1], torch.zeros(3)):
        torch.save(content, path)
        with pytest.raises(UserError, match="has no tensor named inner"):
            read_state(path)
