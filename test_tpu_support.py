# PYTHON_ARGCOMPLETE_OK
"""Run scripts/test_tpu_support.py under the name that the guide uses, and import from it."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent / "scripts" / "test_tpu_support.py"), run_name="__main__")
else:
    from scripts.test_tpu_support import *  # noqa: F403
