# PYTHON_ARGCOMPLETE_OK
"""scripts/pretrain.py, by the name that the guide calls it."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent / "scripts" / "pretrain.py"), run_name="__main__")
