"""Imports go one way, three files import torch_xla, and nothing edits sys.path. Checked by parsing the source."""

import ast
import functools
import graphlib
import re
import statistics
from pathlib import Path

from qat_lora.errors import ROOT

ORDER = [  # each subpackage imports only itself and those before it
    "errors", "hosts", "backend", "kernels", "ahead", "run", "models", "data", "quant", "train", "kd", "lora", "rl",
    "layer_qat", "export", "experiments", "hardware",
]  # fmt: skip
PACKAGE = sorted((ROOT / "qat_lora").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
XLA = {"qat_lora/backend/xla.py", "qat_lora/ahead/recording.py", "qat_lora/kernels/lazy.py"}
EVERYTHING = [*PACKAGE, *SCRIPTS, *(p for d in ("benchmarks", "tests") for p in sorted((ROOT / d).rglob("*.py")))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, at any level; `from a.b import c` gives a.b and a.b.c."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path, level: int) -> set[str]:
    """The parts of qat_lora that a file imports from: {"run", "quant", …} at level 1, {"athena", …} at level 2."""
    parts = [module.split(".") for module in imported(path) if module.startswith("qat_lora.")]
    return {part[level] for part in parts if len(part) > level and (level == 1 or part[1] == "experiments")}


def subpackage(path: Path) -> str:
    return path.relative_to(ROOT / "qat_lora").parts[0].removesuffix(".py")


def test_the_search_finds_the_code():
    assert len(PACKAGE) > 20 and len(SCRIPTS) >= 8
    assert "qat_lora.kd.training" in imported(ROOT / "scripts" / "train_qat.py")
    assert {subpackage(path) for path in PACKAGE} == {*ORDER, "__init__"}


def test_imports_go_one_way():
    """The package's own __init__.py names its modules as strings."""
    for path in PACKAGE:
        if (own := subpackage(path)) != "__init__":
            assert ours(path, 1) <= set(ORDER[: ORDER.index(own) + 1]), name(path)


def test_no_file_imports_one_that_imports_it():
    """Not even later, inside a function: whoever reads one file would have to know the other."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE}
    graph = {name: imported(path) & files.keys() - {name} for name, path in files.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_an_experiment_imports_no_other_experiment():
    for path in PACKAGE:
        if subpackage(path) == "experiments":
            assert ours(path, 2) <= {path.relative_to(ROOT / "qat_lora").parts[1]}, name(path)


def test_the_package_imports_no_script_and_no_test_and_a_script_no_script():
    others = {script.stem for script in SCRIPTS} | {"scripts"}
    for paths, foreign in ((PACKAGE, {"scripts", "tests", "benchmarks", "conftest"}), (SCRIPTS, others)):
        for path in paths:
            assert not {module.split(".")[0] for module in imported(path)} & foreign, name(path)


DEVICE_ASKED = re.compile(r"\.(kind|device\.type) *(==|!=|in\b|not in\b)|\bdevice_type *==")


def test_only_the_backend_and_its_kernels_check_the_kind_of_device():
    """Other code asks for capabilities. A `kind` of something else, e.g. of a reservoir (`spec.kind`), is allowed."""
    for path in (*PACKAGE, *SCRIPTS):
        if path in SCRIPTS or subpackage(path) not in ("hosts", "backend", "kernels", "ahead"):
            lines = [line for line in path.read_text().splitlines() if DEVICE_ASKED.search(line)]
            asking = [line for line in lines if not re.search(r"(spec|self|entry|e|rows)\.kind", line)]
            assert not asking, name(path)


def test_checks_of_the_device_are_recognised():
    for line in ('if backend.kind == "xla":', 'if x.device.type != "cpu":', 'if backend.kind in ("cpu", "cuda"):'):
        assert DEVICE_ASKED.search(line), line
    assert not DEVICE_ASKED.search("if backend.static_shapes:")


def test_training_scripts_import_qat_lora_before_torch():
    for path in sorted((ROOT / "scripts").glob("*train*.py")):
        nodes = [node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [node.names[0].name if isinstance(node, ast.Import) else node.module for node in nodes]
        roots = [module.split(".")[0] for module in names]
        assert "torch" not in roots or roots.index("qat_lora") < roots.index("torch"), name(path)


def test_only_three_files_import_torch_xla():
    """The first two do so at their top, because they are imported only once the device is chosen."""
    using = {p for p in (*PACKAGE, *SCRIPTS) if "torch_xla" in {module.split(".")[0] for module in imported(p)}}
    assert set(map(name, using)) == XLA


def edits_sys_path(node: ast.AST) -> bool:
    """sys.path.insert(…), sys.path[:0] = …, sys.path += …, sys.path = …; reading it is fine."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value]
    elif isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    else:
        targets = [node.target] if isinstance(node, ast.AugAssign) else []
    return any(ast.unparse(target).split("[")[0] == "sys.path" for target in targets)


def test_no_file_edits_sys_path():
    for code in ("sys.path.insert(0, 'x')", "sys.path += ['x']", "sys.path[:0] = ['x']", "sys.path = []"):
        assert any(map(edits_sys_path, ast.walk(ast.parse(code)))), code
    for code in ("print(sys.path)", "x = [p for p in sys.path]"):
        assert not any(map(edits_sys_path, ast.walk(ast.parse(code)))), code
    files = [path for path in EVERYTHING if "sys.path" in path.read_text()]
    found = [f"{name(p)}:{node.lineno}" for p in files for node in ast.walk(tree(p)) if edits_sys_path(node)]
    assert not found


# -- sizes -----------------------------------------------------------------------------------------------------------
def test_core_files_and_functions_stay_short():
    """Files of the core have a median of at most 150 lines and at most 400; 95% of functions at most 40."""
    files = [path for path in (ROOT / "qat_lora").rglob("*.py") if path.stat().st_size]
    lines = {path: len(path.read_text().splitlines()) for path in files}
    assert statistics.median(lines.values()) <= 150
    assert {path.name: count for path, count in lines.items() if count > 400} == {}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for path in files for node in ast.walk(tree(path)) if isinstance(node, kinds)]
    lengths = sorted(node.end_lineno - node.lineno + 1 for node in nodes)
    assert lengths[int(0.95 * len(lengths))] <= 40
