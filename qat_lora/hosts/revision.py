"""The commit of the running code, and the check that all workers of a job run the same code and packages."""

import hashlib
import subprocess
import sys
from pathlib import Path

from qat_lora.errors import ROOT, installed_version, to_stderr
from qat_lora.hosts.group import Group

VERSIONS = ("torch", "torch_xla", "transformers", "peft", "safetensors", "numpy")


def git_state() -> tuple[str, bool | None]:
    """Short revision and whether the tree has changes; ("nogit", None) outside a checkout."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
        return head.stdout.strip(), bool(status.stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return "nogit", None


def revision() -> str:
    """The commit at which a figure was measured, in readable form."""
    commit, dirty = git_state()
    return f"{commit} with changes" if dirty else commit


def agree_on_code(group: Group) -> None:
    """Raise UserError in every worker if any runs different code from worker 0; warn if package versions differ."""
    if group.world_size == 1:
        return
    script = Path(sys.argv[0]).name
    group.agree({"the script": (script, script)}, "start the same one on every host")
    mine = code_digest()
    group.agree({"code": (mine, f"{revision()} ({mine})")}, "check out the same revision on every host")
    everyone = group.gather(
        {name: str(getattr(sys.modules.get(name), "__version__", installed_version(name))) for name in VERSIONS}
    )  # of the imported module or, without one, of the installed package
    for rank, theirs in enumerate(everyone):
        other = [name for name in VERSIONS if theirs[name] != everyone[0][name]]
        if other and group.rank in (0, rank):
            name = other[0]
            to_stderr(
                f"warning: {name} is {everyone[0][name]} for {group.name(0)}, {theirs[name]} for {group.name(rank)}; "
                "figures may differ"
            )


def code_digest() -> str:
    """Twelve hexadecimal digits of a checksum over the code, uncommitted changes included."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".c"))
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main and Path(main).resolve().is_relative_to(ROOT):
        files.append(Path(main).resolve())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]
