"""Every documented command parses, every preset fits its script, every Make target finds its files."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from qat_lora.errors import ROOT, UserError
from qat_lora.quant.student import StudentSpec
from qat_lora.run.command_line import parse

SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
PRESETS = sorted((ROOT / "configs").glob("*/*.yaml"))
ELLIPSIS = ("...", "…")
PRESETS_OF = {"train_recovery_lora_multi": "train_recovery_lora", "train_v2_tpu_multi": "train_qat"}
RECOVERY = (
    "--model Qwen/Qwen3-0.6B --checkpoint runs/v2_q4/best.pt --kd-cache-dir caches/wikitext103_L1024_K128 "
    "--recovery-r 8 --batch-size 4 --accumulation-steps 8 --max-steps 1000"
)
RECOVERED = (
    "model=Qwen/Qwen3-0.6B checkpoint=runs/v2_q4/best.pt cache_dir=caches/wikitext103_L1024_K128 lora_r=8 batch_size=4 "
    "accumulation_steps=8 max_steps=1000"
)
OPENHERMES = "--cache-dir caches/openhermes_L128_K128_N50K --config q4_r32"
SEED_GUIDES = {  # as written in the guides of the project's seeds: what each command sets
    "python pretrain.py": "device=auto",
    "python pretrain.py device_type=tpu": "device=tpu",
    "python pretrain.py device_type=cuda": "device=cuda",
    "python pretrain.py device_type=cpu": "device=cpu",
    "python pretrain.py device_type=tpu global_batch_size=1024": "device=tpu global_batch_size=1024",
    "python scripts/smoke_test.py --run-training --train-epochs 5": "run_training=True train_epochs=5 device=auto",
    "python scripts/smoke_test.py --run-training --train-epochs 5 device_type=tpu": "device=tpu train_epochs=5",
    f"python scripts/train_recovery_lora.py --tpu {RECOVERY}": f"{RECOVERED} device=tpu num_chips=None",
    "PT_XLA_DEBUG=1 python scripts/train_recovery_lora.py --tpu ...": "device=tpu num_chips=None",
    "PJRT_DEVICE=TPU python scripts/train_recovery_lora.py ...": "device=auto num_chips=None",
    f"python scripts/train_recovery_lora_multi.py {RECOVERY}": f"{RECOVERED} device=auto num_chips=0",
    f"python scripts/train_v2_tpu_multi.py --from-scratch {OPENHERMES} --batch-size 8 --accumulation-steps 4 "
    "--max-steps 3000": "from_scratch=True cache_dir=caches/openhermes_L128_K128_N50K mlp=uniform4/r32 "
    "attn=uniform4/r32 batch_size=8 accumulation_steps=4 max_steps=3000 num_chips=0",
    "python scripts/train_recovery_lora_multi.py --num-chips 2 ...": "num_chips=2",
    "TPU_NUM_DEVICES=2 python scripts/train_recovery_lora_multi.py ...": "num_chips=0",
    "python scripts/train_musclebob_improved.py --model Qwen/Qwen2.5-0.5B-Instruct --batch-size 2 --epochs 5 "
    "--num-generations 8 --sft --sft-epochs 2": "epochs=5 batch_size=2",
    "python scripts/train_musclebob_improved.py --batch-size 1 --epochs 5": "epochs=5 batch_size=1",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(text: str) -> list[str]:
    """The command lines `[ENV=value …] python scripts/X.py …` (or benchmarks/) in a text, with continuations joined."""
    joined = re.sub(r" *\\\\?\n\s*", " ", text)
    script = r"(?:(?:scripts|benchmarks)/\w+|pretrain)\.py"
    start = rf"(?:^|[`$] ?|\s{{2,}})((?:[A-Z_]+=\S+ )*(?:python3?|\$\(PY\)) {script}[^`\n]*)"
    return [re.split(r"\s+#\s", match)[0].strip() for match in re.findall(start, joined, re.MULTILINE)]


def written() -> list:
    """(where, command) for README, docs, Makefile, the scripts' docstrings and the presets' headers."""
    texts = {name(p): p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]}
    texts["Makefile"] = re.sub(r"^\t@?", "", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    texts |= {name(p): ast.get_docstring(ast.parse(p.read_text())) or "" for p in SCRIPTS}
    for path in PRESETS:
        header = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
        texts[name(path)] = "\n".join(header)
    return [(where, command) for where, text in texts.items() for command in commands(text)]


def words(command: str) -> tuple[str, list[str]]:
    """(script, its arguments), without environment, placeholders and Make's variables."""
    command = re.sub(r"\$\((\w+)\)", r"\1", re.sub(r"\$\(if [^()]*(\([^()]*\)[^()]*)*\)", "", command))
    parts = [part for part in shlex.split(command) if part not in ELLIPSIS]
    at = next(i for i, part in enumerate(parts) if part.startswith(("scripts/", "benchmarks/", "pretrain.py")))
    assert all(re.fullmatch(r"[A-Z_]+=\S*", part) or part in ("python", "python3", "PY") for part in parts[:at]), parts
    end = next((i for i, part in enumerate(parts) if part in ("|", ">", "&&", ";", "2>&1")), len(parts))
    return Path(parts[at]).stem, parts[at + 1 : end]


@pytest.fixture(scope="session")
def config_of(load_script):
    """config_of(script, argv): the script's config for this command line."""

    def make(script: str, argv: list[str]):
        if script == "compile_for_tpu":  # its first word is a script, whose options follow
            argv, (other, *options) = load_script(script).split(argv)
            make(other, options)
        if script == "train_qat" and "runs/bits.yaml" in argv:  # which another command writes
            argv = [word for word in argv if word not in ("--config", "runs/bits.yaml")]
        base = PRESETS_OF.get(script)
        defaults = {"num_chips": 0} if base else {}
        return parse(load_script(base or script).Config, script, argv, presets=base, defaults=defaults)

    return make


# -- the search itself -----------------------------------------------------------------------------------------------
def test_commands_are_found_in_prose_fences_and_docstrings():
    text = (
        "Run `PJRT_DEVICE=CPU python scripts/a.py --device xla …` or\n\n```bash\npython scripts/b.py --x 1 \\\n"
        "    --y 2   # a comment\n$ python scripts/c.py\n```\n    python scripts/d.py z=1\n"
    )
    assert commands(text) == [
        "PJRT_DEVICE=CPU python scripts/a.py --device xla …",
        "python scripts/b.py --x 1 --y 2",
        "python scripts/c.py",
        "python scripts/d.py z=1",
    ]
    assert words(commands(text)[0]) == ("a", ["--device", "xla"])


# -- commands --------------------------------------------------------------------------------------------------------
def test_every_documented_command_parses(config_of):
    found = written()
    for where, command in found:
        script, argv = words(command)
        assert any((ROOT / folder / f"{script}.py").is_file() for folder in ("scripts", "benchmarks")), (where, script)
        if argv != ["--help"]:
            try:
                config_of(script, argv)
            except UserError as error:
                pytest.fail(f"{where}: {command}: {error}")
    places = {place for place, _ in found}
    assert {"README.md", "Makefile"} <= places and any(place.startswith("docs/") for place in places)
    assert {name(path) for path in SCRIPTS} <= places, "every script's docstring says how to launch it"


@pytest.mark.parametrize("command", SEED_GUIDES)
def test_commands_of_the_seed_guides_set_their_values(config_of, command):
    config = config_of(*words(command))
    for setting in SEED_GUIDES[command].split():
        name, value = setting.split("=")
        assert str(getattr(config, name)) == value, setting


# -- presets ---------------------------------------------------------------------------------------------------------
def test_every_preset_fits_its_script_and_has_a_header(config_of):
    wanted = {"q4_r32", "q2a4", "q4a4", "q2_g32", "q2_g64", "q4_g32", "apple_q2"}
    assert wanted <= {path.stem for path in PRESETS if path.parent.name == "train_qat"}
    for path in PRESETS:
        script = path.parent.name
        config = config_of(script, ["--config", path.stem])
        assert config != config_of(script, []) and config.config == path.stem, name(path)
        if script == "train_qat":
            StudentSpec(mlp=config.mlp, attn=config.attn, head=config.head)
        assert path.read_text().startswith("# "), f"the header of {name(path)} must say what to run and expect"


# -- Make ------------------------------------------------------------------------------------------------------------
def recipes() -> dict[str, list[str]]:
    """Target → its recipe lines."""
    found = re.findall(r"^([a-z0-9-]+):(?!=)(?!.*:=).*\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target: lines.splitlines() for target, lines in found}


def test_the_files_of_every_make_target_exist():
    assert recipes().keys() >= {"help", "setup", "demo", "test", "lint", "doctor"}
    for target, lines in recipes().items():
        for line in lines:
            for file in re.findall(r"\b(?:scripts|benchmarks|configs|docs)/[\w./-]+\w", line):
                assert (ROOT / file).exists(), f"make {target} uses {file}"
            script, preset = re.search(r"scripts/(\w+)\.py", line), re.search(r"--config (\w+)", line)
            if script and preset:
                folder = PRESETS_OF.get(script[1], script[1])
                assert (ROOT / "configs" / folder / f"{preset[1]}.yaml").is_file(), f"make {target}: {preset[1]}"


def test_every_target_has_a_description_and_the_readme_names_no_other():
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^\.PHONY: \$\(shell grep", text, re.MULTILINE), "every target is phony"
    for target in recipes():
        assert re.search(rf"^{re.escape(target)}:.*## \S", text, re.MULTILINE), f"{target} is not in `make help`"
    targets = re.findall(r"`make ([a-z0-9-]+)", (ROOT / "README.md").read_text())
    assert targets and set(targets) <= set(recipes())
