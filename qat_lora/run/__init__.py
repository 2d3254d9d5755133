"""One run: its options, directory, checkpoints, session and report."""

from qat_lora.errors import explain_missing_packages

explain_missing_packages()  # before anything below imports one
