"""Runs scripts one after the other in a process where importing a heavy package fails: reads a list of [path, flags,
environment] as JSON and writes a list of [exit code, standard output, standard error]. With python -S no package is
installed at all."""

import io
import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

HEAVY = ("torch", "transformers", "numpy", "datasets", "peft", "matplotlib", "pyarrow")


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise AssertionError(f"{name} is imported")


def run(path: str, flags: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    for name in [name for name in sys.modules if name.startswith("qat_lora")]:
        del sys.modules[name]  # each script imports them again, as in a process of its own
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    ours = {"argv": [path, *flags], "path": [str(Path(path).parent), *sys.path[1:]], "excepthook": sys.__excepthook__}
    code = 0
    with mock.patch.multiple(sys, stdout=out, stderr=err, **ours), mock.patch.dict(os.environ, environment):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):  # as Python ends a process
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
    for stream in (out, err):
        stream.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


if __name__ == "__main__":
    sys.meta_path.insert(0, Refuse())
    os._exit = sys.exit  # argcomplete would end this process after the first script
    print(json.dumps([run(*command) for command in json.load(sys.stdin)]))
