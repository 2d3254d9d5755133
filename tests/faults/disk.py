"""Trials with full and read-only disks: in-memory file systems, each mounted for one trial."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from subjects import BY_NAME, OUT, SUBJECTS, TOOLS
from trials import Bench, Trial, Unexpected, check_refusal, check_same, finish, in_child, said, used

FULL, READ_ONLY = "full disk", "read-only folder"
SHARES = (0.0, 0.3, 0.6, 0.9, 1.1, 1.5)  # of the space that a command needs
FILLER = "filler"
ROOM = 2**16  # kB, enough for every command
NEW_NAMESPACE, NEW_USER = 0x00020000, 0x10000000
RDONLY, REMOUNT, PRIVATE = 1, 32, 1 << 18 | 1 << 14
WRITERS = tuple(tool for tool in TOOLS if OUT in tool.flags)
C = ctypes.CDLL(None, use_errno=True)


def mount(path: str, kind: str | None, flags: int, options: str | None = None) -> None:
    given = [None if text is None else text.encode() for text in ("tmpfs", path, kind)]
    if C.mount(*given, flags, None if options is None else options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {path}: {os.strerror(ctypes.get_errno())}")


def enter_namespace() -> None:
    """Give this process its own mounts. Raises OSError if the machine does not allow it."""
    user, group = os.getuid(), os.getgid()
    if C.unshare(NEW_NAMESPACE if user == 0 else NEW_NAMESPACE | NEW_USER):
        raise OSError(ctypes.get_errno(), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    mount("/", None, PRIVATE)


def allowed(base: Path) -> bool:
    """Whether this machine allows mounting a disk."""
    (base / "mounted").mkdir(parents=True, exist_ok=True)

    def attempt() -> bool:
        try:
            enter_namespace()
            mount(str(base / "mounted"), "tmpfs", 0, "size=64k")
        except OSError:
            return False
        return True

    return in_child(attempt)


def trials(bench: Bench) -> Iterator[Trial]:
    for subject in bench.chosen((*SUBJECTS, *WRITERS)):
        need = bench.reference(subject).kilobytes
        for share in SHARES:
            yield Trial(FULL, subject.name, f"{share:.0%} of the room", partial(full, share=share, need=need))
    for subject in bench.chosen((*SUBJECTS, *WRITERS)):
        for what in ("new", "resumed") if subject.trains else ("new",):
            yield Trial(READ_ONLY, subject.name, what, partial(read_only, resumed=what == "resumed"))


def full(bench: Bench, folder: Path, trial: Trial, share: float, need: int) -> str:
    """Run a command on a disk with a share of the space it needs, and again once there is enough."""
    subject = BY_NAME[trial.subject]
    room = int(need * share * trial.dice.uniform(0.85, 1.15)) // 4 * 4
    before = used(bench.prepare(subject, folder) / OUT)
    on_disk(folder, f"size={before + room + 4}k")
    (folder / OUT / FILLER).write_bytes(bytes(4096))  # a disk cannot have size zero
    ended = subject.start(folder).wait()
    (folder / OUT / FILLER).unlink()
    if not ended.code:
        check_same(bench, subject, folder, ended)
        return "same result"
    check_refusal(ended, OUT)
    if "No space left" not in ended.err:
        raise Unexpected(f"does not say that the disk is full: {said(ended)}")
    mount(str(folder / OUT), "tmpfs", REMOUNT, f"size={ROOM}k")
    finish(bench, subject, folder)
    return "refused, and resumed with room"


def on_disk(folder: Path, options: str) -> None:
    """Move the contents of OUT to a new disk mounted there."""
    enter_namespace()
    aside = folder / "aside"
    (folder / OUT).rename(aside)
    (folder / OUT).mkdir()
    mount(str(folder / OUT), "tmpfs", 0, options)
    shutil.copytree(aside, folder / OUT, dirs_exist_ok=True)


def read_only(bench: Bench, folder: Path, trial: Trial, resumed: bool) -> str:
    subject = BY_NAME[trial.subject]
    if resumed:
        shutil.copytree(bench.interrupted(subject, subject.late), folder)
    else:
        bench.prepare(subject, folder)
    on_disk(folder, f"size={ROOM}k")
    mount(str(folder / OUT), "tmpfs", REMOUNT | RDONLY, f"size={ROOM}k")
    check_refusal(subject.start(folder).wait(), OUT)
    mount(str(folder / OUT), "tmpfs", REMOUNT, f"size={ROOM}k")
    finish(bench, subject, folder)
    return "refused, and resumed"
