"""Imports go one way, torch_xla stays behind one door, and nothing edits sys.path. Read from the source, not run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOOR = ("backend", "run")
MIDDLE = ("data", "models", "quant", "kd", "rl")
SHARED = ("errors", "git", "hub", "machine", "urls")  # what every folder may import
PACKAGE = sorted((ROOT / "qat_lora").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
EVERYTHING = [*PACKAGE, *SCRIPTS, *(p for d in ("benchmarks", "tests") for p in sorted((ROOT / d).rglob("*.py")))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere in it; `from a.b import c` gives a.b and a.b.c."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def of_ours(path: Path) -> set[str]:
    """The second names of what it imports from qat_lora: {"run", "quant", …}."""
    return {module.split(".")[1] for module in imported(path) if module.startswith("qat_lora.")}


def layer(path: Path) -> str:
    return path.relative_to(ROOT / "qat_lora").parts[0].removesuffix(".py")


def test_the_walk_finds_the_code():
    assert len(PACKAGE) > 20 and len(SCRIPTS) >= 8
    assert "qat_lora.experiments.qat" in imported(ROOT / "scripts" / "train_qat.py")
    assert "torch_xla" in imported(ROOT / "qat_lora" / "backend" / "xla.py")


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_imports_go_one_way(path):
    own, used = layer(path), of_ours(path)
    if own == "__init__":
        return  # names its modules as text
    if own in SHARED:
        assert used <= set(SHARED)
    elif own == "backend":
        assert used <= {"backend", *SHARED}
    elif own == "run":
        assert used <= {*FLOOR, *SHARED}
    elif own in MIDDLE:
        assert used <= {*FLOOR, *MIDDLE, *SHARED}
    else:
        pipelines = {layer(p) for p in PACKAGE} - {*FLOOR, *MIDDLE, *SHARED, "__init__"}
        assert used <= {*FLOOR, *MIDDLE, *SHARED, *pipelines}


@pytest.mark.parametrize("folder", MIDDLE)
def test_no_circle_between_the_folders_of_the_middle(folder):
    """The folders can be put in an order in which each imports only earlier ones."""
    uses = {f: set().union(*map(of_ours, (ROOT / "qat_lora" / f).glob("*.py"))) & set(MIDDLE) - {f} for f in MIDDLE}
    reached, front = set(), {folder}
    while front:
        front = set().union(*(uses[f] for f in front)) - reached
        reached |= front
    assert folder not in reached, f"{folder} → {sorted(uses[folder])} leads back to it"


@pytest.mark.parametrize("path", PACKAGE, ids=name)
def test_package_imports_no_script_and_no_test(path):
    assert not {module.split(".")[0] for module in imported(path)} & {"scripts", "tests", "benchmarks", "conftest"}


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*train*.py")), ids=name)
def test_training_scripts_set_what_torch_reads_before_they_import_it(path):
    names = [alias.name if isinstance(node, ast.Import) else node.module
             for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
             for alias in node.names]  # fmt: skip
    roots = [module.split(".")[0] for module in names]
    assert "torch" not in roots or roots.index("qat_lora") < roots.index("torch")


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_script_imports_no_script(path):
    others = {script.stem for script in SCRIPTS} | {"scripts"}
    assert not {module.split(".")[0] for module in imported(path)} & others


@pytest.mark.parametrize("path", [*PACKAGE, *SCRIPTS], ids=name)
def test_torch_xla_is_imported_only_in_the_backend(path):
    if path.parent != ROOT / "qat_lora" / "backend":
        assert not {module for module in imported(path) if module.split(".")[0] == "torch_xla"}


def test_backend_imports_torch_xla_only_in_the_files_that_open_after_the_choice():
    """At module level; a function may import it late."""
    for path in sorted((ROOT / "qat_lora" / "backend").glob("*.py")):
        top = ast.Module([node for node in ast.parse(path.read_text()).body], [])
        direct = {
            alias.name.split(".")[0]
            for node in top.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module)])
        }
        assert ("torch_xla" in direct) == (path.name in ("xla.py", "probe.py")), path.name


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
def test_the_walk_sees_edits(code, edits):
    assert any(map(edits_sys_path, ast.walk(ast.parse(code)))) is edits


@pytest.mark.parametrize("path", EVERYTHING, ids=name)
def test_no_file_edits_sys_path(path):
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if edits_sys_path(node)]
    assert not lines, f"{name(path)} edits sys.path in lines {lines}"
