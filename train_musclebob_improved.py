# PYTHON_ARGCOMPLETE_OK
"""Run scripts/train_musclebob_improved.py under the name that the guide uses, and import from it."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent / "scripts" / "train_musclebob_improved.py"), run_name="__main__")
else:
    from scripts.train_musclebob_improved import *  # noqa: F403
