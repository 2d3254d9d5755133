"""Imports go one way, three files import torch_xla, and nothing edits sys.path. Checked by parsing the source."""

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = [  # each subpackage imports only itself and those before it
    "errors", "backend", "run", "models", "data", "quant", "train", "kd", "lora", "rl", "layer_qat", "export",
    "experiments", "hardware",
]  # fmt: skip
PACKAGE = sorted((ROOT / "qat_lora").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
XLA = [ROOT / "qat_lora" / "backend" / name for name in ("xla.py", "recording.py", "graph.py")]
EVERYTHING = [*PACKAGE, *SCRIPTS, *(p for d in ("benchmarks", "tests") for p in sorted((ROOT / d).rglob("*.py")))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any level; `from a.b import c` gives a.b and a.b.c."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def of_ours(path: Path) -> set[str]:
    """The subpackages of qat_lora that a file imports from: {"run", "quant", …}."""
    return {module.split(".")[1] for module in imported(path) if module.startswith("qat_lora.")}


def room_or_script(path: Path) -> str:
    return room(path) if path in PACKAGE else "scripts"


def room(path: Path) -> str:
    return path.relative_to(ROOT / "qat_lora").parts[0].removesuffix(".py")


def test_the_search_finds_the_code():
    assert len(PACKAGE) > 20 and len(SCRIPTS) >= 8
    assert "qat_lora.kd.training" in imported(ROOT / "scripts" / "train_qat.py")
    assert "torch_xla" in imported(ROOT / "qat_lora" / "backend" / "xla.py")


def test_the_order_lists_every_subpackage():
    assert {room(path) for path in PACKAGE} == {*ORDER, "__init__"}


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_imports_go_one_way(path):
    if room(path) != "__init__":  # it names its modules as strings
        assert of_ours(path) <= set(ORDER[: ORDER.index(room(path)) + 1])


@pytest.mark.parametrize("path", [p for p in PACKAGE if room(p) == "experiments"], ids=name)
def test_an_experiment_imports_no_other_experiment(path):
    used = {module.split(".")[2] for module in imported(path) if module.startswith("qat_lora.experiments.")}
    assert used <= {path.relative_to(ROOT / "qat_lora").parts[1]}


DEVICE_ASKED = re.compile(r"\.(kind|device\.type) *(==|!=|in\b|not in\b)|\bdevice_type *==")


@pytest.mark.parametrize("path", [p for p in [*PACKAGE, *SCRIPTS] if room_or_script(p) != "backend"], ids=name)
def test_only_the_backend_checks_the_kind_of_device(path):
    """Other code asks for capabilities. A `kind` of something else, e.g. of a reservoir (`spec.kind`), is allowed."""
    lines = [line for line in path.read_text().splitlines() if DEVICE_ASKED.search(line)]
    assert not [line for line in lines if not re.search(r"(spec|self|entry|e|rows)\.kind", line)]


@pytest.mark.parametrize(
    "line, asks",
    [
        ('if backend.kind == "xla":', True),
        ('if x.device.type != "cpu":', True),
        ("if spec.kind == 2:", True),
        ('if backend.kind in ("cpu", "cuda"):', True),
        ("if backend.static_shapes:", False),
    ],
)
def test_the_pattern_recognises_checks_of_the_device(line, asks):
    assert bool(DEVICE_ASKED.search(line)) is asks


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_package_imports_no_script_and_no_test(path):
    assert not {module.split(".")[0] for module in imported(path)} & {"scripts", "tests", "benchmarks", "conftest"}


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*train*.py")), ids=name)
def test_training_scripts_import_qat_lora_before_torch(path):
    names = [
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    roots = [module.split(".")[0] for module in names]
    assert "torch" not in roots or roots.index("qat_lora") < roots.index("torch")


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_script_imports_no_script(path):
    others = {script.stem for script in SCRIPTS} | {"scripts"}
    assert not {module.split(".")[0] for module in imported(path)} & others


@pytest.mark.parametrize("path", [*PACKAGE, *SCRIPTS], ids=name)
def test_only_three_files_import_torch_xla(path):
    """The first two do so at their top, because they are imported only once the device is chosen."""
    uses = {module for module in imported(path) if module.split(".")[0] == "torch_xla"}
    assert bool(uses) == (path in XLA)


def edits_sys_path(node: ast.AST) -> bool:
    """sys.path.insert(…), sys.path[:0] = …, sys.path += …, sys.path = …; reading it is fine."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value]
    elif isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    else:
        targets = [node.target] if isinstance(node, ast.AugAssign) else []
    return any(ast.unparse(target).split("[")[0] == "sys.path" for target in targets)


@pytest.mark.parametrize(
    "code, edits",
    [
        ("sys.path.insert(0, 'x')", True), ("sys.path += ['x']", True), ("sys.path[:0] = ['x']", True),
        ("sys.path = []", True), ("print(sys.path)", False), ("x = [p for p in sys.path]", False),
    ],
)  # fmt: skip
def test_edits_of_sys_path_are_recognised(code, edits):
    assert any(map(edits_sys_path, ast.walk(ast.parse(code)))) is edits


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_no_file_edits_sys_path(path):
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if edits_sys_path(node)]
    assert not lines, f"{name(path)} edits sys.path in lines {lines}"


# -- sizes -----------------------------------------------------------------------------------------------------------
def test_core_files_and_functions_stay_short():
    """Files of the core have a median of at most 150 lines and at most 400; 95% of functions at most 40."""
    files = [path for path in (ROOT / "qat_lora").rglob("*.py") if path.stat().st_size]
    lines = {path: len(path.read_text().splitlines()) for path in files}
    assert statistics.median(lines.values()) <= 150
    assert {path.name: count for path, count in lines.items() if count > 400} == {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    lengths = sorted(node.end_lineno - node.lineno + 1 for node in nodes)
    assert lengths[int(0.95 * len(lengths))] <= 40
