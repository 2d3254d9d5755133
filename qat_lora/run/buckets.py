"""Files of a bucket (gs://, s3:// or any other URL that fsspec opens), used like those of a folder."""

import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

from qat_lora.errors import FULL_DISK, UserError
from qat_lora.run.files import sha256, write_atomically
from qat_lora.run.remote import CLOUDS, opened

SILENCE = 60.0  # seconds without progress after which a call into a cloud package is abandoned
PAUSES = (1.0, 4.0)  # seconds before each further try
SLOWEST = 10**6  # bytes/s: an upload reports no progress, so its limit grows by its size / SLOWEST
POLL = 0.1  # seconds between looks at the clock
FINAL = (UserError, FileNotFoundError, PermissionError, ImportError)  # trying again does not help


class Damaged(UserError):
    """A file whose content has another checksum."""


class BucketPath:
    """A file or folder in a bucket, with the methods of pathlib.Path that a cache needs. In an object store a file is
    complete or absent.

    Every call is tried again after a failure. Raises UserError with the URL if that does not help, or if nothing
    arrives for SILENCE seconds, even if the cloud package never returns.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.name = self.url.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "BucketPath":
        return BucketPath(f"{self.url}/{name}")

    def exists(self) -> bool:
        return self._ask(lambda files, path, _: files.exists(path))

    is_file = exists

    def sizes(self) -> dict[str, int]:
        """The files of a folder and their bytes."""
        found = self._ask(lambda files, path, _: files.find(path, maxdepth=1, detail=True))
        return {name.rsplit("/", 1)[-1]: entry["size"] for name, entry in found.items()}

    def read_text(self, encoding: str = "utf-8") -> str:
        return self._ask(lambda files, path, _: files.cat_file(path)).decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        def ask(files, path, _) -> None:
            if self.url.split("://")[0] not in CLOUDS:  # a cloud package might create the bucket
                files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            files.pipe_file(path, content)

        self._ask(ask, len(content) / SLOWEST)

    @contextmanager
    def copied(self, total: str) -> Iterator[Path]:
        """Yield a temporary copy of a file whose sha256 is `total`. It may be removed while it is memory-mapped."""
        with tempfile.TemporaryDirectory(prefix="qat-lora-", ignore_cleanup_errors=True) as folder:
            copy = Path(folder, self.name)

            def ask(files, path, progress: _Progress) -> None:
                try:
                    files.get_file(path, str(copy), callback=progress)
                except OSError as error:
                    if error.errno in FULL_DISK:
                        fix = "free some space, or set TMPDIR to a folder on a larger disk"
                        raise UserError(f"{folder} has no room for a copy of {self}; {fix}") from error
                    raise
                if sha256(copy) != total:
                    raise Damaged(f"{self} is damaged (checksum)")

            self._ask(ask)
            yield copy

    def _ask(self, ask: Callable[[Any, str, "_Progress"], Any], more: float = 0) -> Any:
        """ask(file system, path in it, progress), tried again after a failure. more: seconds it may take longer."""
        progress = _Progress()

        def tries() -> Any:
            with opened(self.url) as (files, path):
                for pause in (*PAUSES, None):
                    progress.last = time.monotonic() + more
                    files.invalidate_cache()  # another host may have written there
                    try:
                        return ask(files, path, progress)
                    except Exception as error:
                        if pause is None or (isinstance(error, FINAL) and not isinstance(error, Damaged)):
                            raise
                    time.sleep(pause)

        return _awaited(tries, self.url, progress)


class _Progress(Callback):
    """When something last arrived."""

    def __init__(self):
        super().__init__()
        self.last = time.monotonic()

    def relative_update(self, inc=1) -> None:
        self.last = time.monotonic()


def _awaited(work: Callable[[], Any], url: str, progress: _Progress) -> Any:
    """work(), in a thread of its own that is abandoned when it no longer makes progress."""
    answer: queue.SimpleQueue = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:
            answer.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    while True:
        with suppress(queue.Empty):
            result, error = answer.get(timeout=POLL)
            if error is not None:
                raise error
            return result
        check_wanted(url)
        if time.monotonic() - progress.last > SILENCE:
            fix = "check the address and the network, then run the command again"
            raise UserError(f"{url} has not answered for {SILENCE:g} s; {fix}")


def check_wanted(url: str) -> None:
    """Raise UserError if nobody waits for this thread any more: its event `stop`, if it has one, is set."""
    stop = getattr(threading.current_thread(), "stop", None)
    if stop is not None and stop.is_set():
        raise UserError(f"{url} is no longer needed")


def path_of(place: str | Path | BucketPath) -> Path | BucketPath:
    """The path of a folder or file, which may be the URL of one in a bucket. Raises UserError for half a URL."""
    if isinstance(place, Path | BucketPath) or not re.match(r"[a-z][a-z0-9+]*:/|:/", place):
        return place if isinstance(place, BucketPath) else Path(place)
    if place.startswith("file:///"):
        return Path(place.removeprefix("file://"))
    if not re.match(r"[a-z][a-z0-9+]*://[^/]", place):
        raise UserError(f"{place} is not the URL of a folder; give e.g. gs://BUCKET/FOLDER")
    return BucketPath(place)


def put(path: Path | BucketPath, content: bytes) -> None:
    """Write a file, completely or not at all, see `write_atomically`."""
    if isinstance(path, BucketPath):
        return path.write_bytes(content)
    write_atomically(path, lambda file: file.write(content))


def sizes(folder: Path | BucketPath) -> dict[str, int]:
    """The files of a folder and their bytes."""
    if isinstance(folder, BucketPath):
        return folder.sizes()
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
