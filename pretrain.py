# PYTHON_ARGCOMPLETE_OK
"""Run scripts/pretrain.py, under the name that the guide uses."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent / "scripts" / "pretrain.py"), run_name="__main__")
