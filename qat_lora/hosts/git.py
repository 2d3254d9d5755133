"""The commit of the running code."""

import subprocess

from qat_lora.errors import ROOT


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
