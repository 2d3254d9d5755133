"""Every documented command parses, every preset fits its script, every Make target finds its files."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from qat_lora.run.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
PRESETS = sorted((ROOT / "configs").glob("*/*.yaml"))
ELLIPSIS = ("...", "…")
PRESETS_OF = {"train_recovery_lora_multi": "train_recovery_lora", "train_v2_tpu_multi": "train_qat"}
SEED_GUIDES = [  # as written in the guides of the project's seeds
    "python pretrain.py",
    "python pretrain.py device_type=tpu",
    "python pretrain.py device_type=cuda",
    "python pretrain.py device_type=cpu",
    "python pretrain.py device_type=tpu global_batch_size=1024",
    "python scripts/smoke_test.py --run-training --train-epochs 5",
    "python scripts/smoke_test.py --run-training --train-epochs 5 device_type=tpu",
    "python scripts/train_recovery_lora.py --tpu --model Qwen/Qwen3-0.6B --checkpoint runs/v2_q4/best.pt "
    "--kd-cache-dir caches/wikitext103_L1024_K128 --recovery-r 8 --batch-size 4 --accumulation-steps 8 "
    "--max-steps 1000",
    "PT_XLA_DEBUG=1 python scripts/train_recovery_lora.py --tpu ...",
    "PJRT_DEVICE=TPU python scripts/train_recovery_lora.py ...",
    "python scripts/train_recovery_lora_multi.py --model Qwen/Qwen3-0.6B --checkpoint runs/v2_q4/best.pt "
    "--kd-cache-dir caches/wikitext103_L1024_K128 --recovery-r 8 --batch-size 4 --accumulation-steps 8 "
    "--max-steps 1000",
    "python scripts/train_v2_tpu_multi.py --from-scratch --cache-dir caches/openhermes_L128_K128_N50K "
    "--config q4_r32 --batch-size 8 --accumulation-steps 4 --max-steps 3000",
    "python scripts/train_recovery_lora_multi.py --num-chips 2 ...",
    "TPU_NUM_DEVICES=2 python scripts/train_recovery_lora_multi.py ...",
    "python scripts/train_musclebob_improved.py --model Qwen/Qwen2.5-0.5B-Instruct --batch-size 2 --epochs 5 "
    "--num-generations 8 --sft --sft-epochs 2",
    "python scripts/train_musclebob_improved.py --batch-size 1 --epochs 5",
]


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
    texts = {
        name(p): p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))] if p.exists()
    }
    makefile = ROOT / "Makefile"
    if makefile.exists():
        texts["Makefile"] = re.sub(r"^\t@?", "", makefile.read_text(), flags=re.MULTILINE)
    texts |= {name(p): ast.get_docstring(ast.parse(p.read_text())) or "" for p in SCRIPTS}
    for path in PRESETS:
        header = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")]
        texts[name(path)] = "\n".join(header)
    return [(where, command) for where, text in texts.items() for command in commands(text)]


WRITTEN = written()


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


def test_every_source_of_commands_has_some():
    where = {place for place, _ in WRITTEN}
    assert "README.md" in where and "Makefile" in where
    assert any(place.startswith("docs/") for place in where)
    assert {name(path) for path in SCRIPTS} <= where, "every script's docstring says how to launch it"


# -- commands --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where, command", WRITTEN)
def test_documented_command_parses(config_of, where, command):
    script, argv = words(command)
    assert any((ROOT / folder / f"{script}.py").is_file() for folder in ("scripts", "benchmarks")), f"{where}: {script}"
    if argv != ["--help"]:
        config_of(script, argv)


@pytest.mark.parametrize("command", SEED_GUIDES)
def test_commands_of_the_seed_guides_parse(config_of, command):
    script, argv = words(command)
    config = config_of(script, argv)
    if script in ("pretrain", "smoke_test"):
        devices = [word.removeprefix("device_type=") for word in argv if word.startswith("device_type=")]
        assert config.device == (*devices, "auto")[0]
        if "global_batch_size=1024" in argv:
            assert config.global_batch_size == 1024
        if script == "smoke_test":
            assert config.run_training and config.train_epochs == 5
        return
    if script == "train_musclebob_improved":
        assert config.epochs == 5 and config.batch_size == (2 if "--sft" in argv else 1)
        return
    assert config.num_chips == (2 if "--num-chips" in argv else 0 if script.endswith("_multi") else None)
    if script == "train_v2_tpu_multi":
        assert config.from_scratch and config.mlp == config.attn == "uniform4/r32"
        assert (config.batch_size, config.accumulation_steps, config.max_steps) == (8, 4, 3000)
        assert config.cache_dir == "caches/openhermes_L128_K128_N50K"
    elif "--max-steps" in argv:
        assert config.device == ("tpu" if "--tpu" in argv else "auto") and config.model == "Qwen/Qwen3-0.6B"
        assert (config.lora_r, config.batch_size, config.accumulation_steps, config.max_steps) == (8, 4, 8, 1000)
        assert (config.checkpoint, config.cache_dir) == ("runs/v2_q4/best.pt", "caches/wikitext103_L1024_K128")


# -- presets ---------------------------------------------------------------------------------------------------------
def test_expected_presets_exist():
    wanted = {"q4_r32", "q2a4", "q4a4", "q2_g32", "q2_g64", "q4_g32", "apple_q2"}
    assert wanted <= {path.stem for path in PRESETS if path.parent.name == "train_qat"}


@pytest.mark.parametrize("path", PRESETS, ids=name)
def test_preset_fits_its_script(config_of, path):
    script = path.parent.name
    config = config_of(script, ["--config", path.stem])
    assert config != config_of(script, []) and config.config == path.stem
    if script == "train_qat":
        from qat_lora.quant.student import StudentSpec

        StudentSpec(mlp=config.mlp, attn=config.attn, head=config.head)
    assert path.read_text().startswith("# "), "a preset's header says what to run and what to expect"


# -- Make ------------------------------------------------------------------------------------------------------------
def recipes() -> dict[str, list[str]]:
    """Target → its recipe lines."""
    found, target = {}, None
    for line in (ROOT / "Makefile").read_text().splitlines():
        match = re.match(r"^([a-z0-9-]+):(?!=)", line)
        if match and ":=" not in line:
            target = match[1]
            found.setdefault(target, [])
        elif line.startswith("\t") and target:
            found[target].append(line.strip())
        elif line and not line.startswith(("\t", " ")):
            target = None
    return found


def test_expected_targets_exist():
    assert recipes().keys() >= {"help", "setup", "demo", "test", "lint", "doctor"}


@pytest.mark.parametrize("target, lines", recipes().items())
def test_files_of_a_make_target_exist(target, lines):
    for line in lines:
        for file in re.findall(r"\b(?:scripts|benchmarks|configs|docs)/[\w./-]+\w", line):
            assert (ROOT / file).exists(), f"make {target} uses {file}"
        script, preset = re.search(r"scripts/(\w+)\.py", line), re.search(r"--config (\w+)", line)
        if script and preset:
            folder = PRESETS_OF.get(script[1], script[1])
            assert (ROOT / "configs" / folder / f"{preset[1]}.yaml").is_file(), f"make {target}: {preset[1]}"


def test_every_target_has_a_description():
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^\.PHONY: \$\(shell grep", text, re.MULTILINE), "every target is phony"
    for target in recipes():
        assert re.search(rf"^{re.escape(target)}:.*## \S", text, re.MULTILINE), f"{target} is not in `make help`"


def test_readme_names_only_targets_that_exist():
    targets = re.findall(r"`make ([a-z0-9-]+)", (ROOT / "README.md").read_text())
    assert targets and set(targets) <= set(recipes())
