"""Trials with files that have flipped bits, are truncated or deleted, or are hostile."""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from subjects import BY_NAME, OUT, RUN, SUBJECTS, TOOLS, Subject
from trials import Bench, Trial, Unexpected, check_refusal, check_same, finish, said

DAMAGED, READ, HOSTILE = "damaged file, resumed", "damaged file, read", "hostile pickle"
FLIPS = ("first byte", "middle byte", "last byte", "random byte")
WHOLE = ("truncated", "deleted")
SHARD = re.compile(r"(shard|heldout)-\d+")
WELL_TRIED = {"QAT", "legal SFT", "GRPO"}  # subjects whose model folder gets every kind of damage
PUT_BACK = 4  # one in so many refusals is retried with the file put back
MARK = "hostile-code-was-run"


# -- damaged files ---------------------------------------------------------------------------------------------------
def trials(bench: Bench) -> Iterator[Trial]:
    for subject in bench.chosen(SUBJECTS):
        late = bench.interrupted(subject, subject.late)
        for path in files(late):
            few = "files" in path.parts or "bucket" in path.parts or SHARD.match(path.name)
            few = few or (path.parts[0] == "model" and subject.name not in WELL_TRIED)
            yield from damages(DAMAGED, subject, late, path, damaged, bool(few))
        if subject.ends:
            end = bench.interrupted(subject, subject.ends[-1])
            for path in files(end):
                if path.is_relative_to(RUN) and path.relative_to(RUN).parts[0] in subject.ends:
                    yield from damages(DAMAGED, subject, end, path, damaged, False)
    for tool in bench.chosen(TOOLS):
        bench.reference(tool)  # so that the files it reads exist
        read = {path for pattern in tool.reads.split() for path in bench.inputs.glob(pattern) if path.is_file()}
        for path in sorted(path.relative_to(bench.inputs) for path in read if path.name != ".lock"):
            yield from damages(READ, tool, bench.inputs, path, misread, bool(SHARD.match(path.name)))


def files(folder: Path) -> list[Path]:
    """All files of a trial's folder, relative to it, except locks and pictures."""
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return sorted(path for path in found if path.suffix != ".png")


def damages(kind: str, subject: Subject, there: Path, path: Path, run, few: bool) -> Iterator[Trial]:
    """Trials with each damage to one file; few: only two of them, chosen by its name."""
    shown = str(path.relative_to(OUT)) if path.is_relative_to(OUT) else str(path)
    if path.parent.name == "files":  # named by a hash of their content, which includes paths
        shown = f"{shown[: -len(path.name)]}{sorted(p.name for p in (there / path.parent).iterdir()).index(path.name)}"
    number = int(hashlib.sha256(f"{subject.name} {shown}".encode()).hexdigest(), 16)
    chosen = [FLIPS[number % 4], FLIPS[(number + 2) % 4], *WHOLE]
    if few:
        chosen = [chosen[number % 2], chosen[2 + number // 2 % 2]]
    for what in chosen:
        yield Trial(kind, subject.name, f"{shown}, {what}", partial(run, there=there, path=path, what=what))


def damage(path: Path, what: str, trial: Trial) -> None:
    data = bytearray(path.read_bytes())
    if what == "deleted":
        path.unlink()
        return
    if what == "truncated":
        data = data[: trial.dice.randrange(max(1, len(data)))]
    elif data:
        places = {"first byte": 0, "middle byte": len(data) // 2, "last byte": len(data) - 1}
        data[places.get(what, trial.dice.randrange(len(data)))] ^= 1 << trial.dice.randrange(8)
    path.write_bytes(data)


def names(path: Path) -> tuple[str, ...]:
    """Names that a refusal may use for a file: its own or that of a parent folder, up to the run's."""
    above = [part for part in path.parts[:-1] if part not in (OUT, "run", "checkpoints")]
    return (path.name, path.stem.replace("_", " "), *above)  # "the chat template"


def damaged(bench: Bench, folder: Path, trial: Trial, there: Path, path: Path, what: str) -> str:
    """Damage a file of an interrupted run or of its inputs: the result stays the same, or the command refuses the file
    and changes nothing."""
    shutil.copytree(there, folder)
    before = (folder / path).read_bytes()
    damage(folder / path, what, trial)
    outcome = same_or_refused(bench, folder, trial, path)
    if outcome == "refused" and trial.dice.randrange(PUT_BACK) == 0:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(before)
        finish(bench, BY_NAME[trial.subject], folder)
        outcome = "refused, and resumed with the file put back"
    return outcome


def misread(bench: Bench, folder: Path, trial: Trial, there: Path, path: Path, what: str) -> str:
    """Damage a file of a finished run that a tool reads."""
    bench.prepare(BY_NAME[trial.subject], folder)
    within = folder / OUT / path
    damage(within if within.exists() else folder / path, what, trial)
    return same_or_refused(bench, folder, trial, path)


def same_or_refused(bench: Bench, folder: Path, trial: Trial, path: Path) -> str:
    subject = BY_NAME[trial.subject]
    ended = subject.start(folder).wait()
    if not ended.code:
        check_same(bench, subject, folder, ended)
        return "same result"
    check_refusal(ended, *names(path))
    return "refused"


# -- pickles ---------------------------------------------------------------------------------------------------------
class Hostile:
    """Writes a file when unpickled."""

    def __reduce__(self):
        return (os.system, (f"touch {MARK}",))


def pickled(zipped: bool) -> bytes:
    """Hostile data that looks like torch.save's: its zip file, or the plain pickle of older versions."""
    if not zipped:
        return pickle.dumps(Hostile(), protocol=2)
    buffer = io.BytesIO()
    torch.save({"tensors": Hostile()}, buffer)
    return buffer.getvalue()


def whole_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints except one that was being deleted when the run was interrupted."""
    return [meta.parent for meta in (folder / RUN / "checkpoints").glob("step_*/meta.json")]


def hostile_trainer(folder: Path, data: bytes) -> None:
    for step in whole_checkpoints(folder):
        write_trainer(step, data)


def hostile_file(folder: Path, data: bytes, name: str) -> None:
    """Replace a file that a run relies on and its copies in the checkpoints, with the right checksums."""
    total = hashlib.sha256(data).hexdigest()
    (folder / RUN / name).write_bytes(data)
    (folder / RUN / "checkpoints" / "files" / total).write_bytes(data)
    for step in whole_checkpoints(folder):
        content = torch.load(step / "trainer.pt", weights_only=True)
        content["meta"]["files"][name] = total
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_trainer(step, buffer.getvalue())


def write_trainer(step: Path, data: bytes) -> None:
    """Replace trainer.pt of a checkpoint, with the right checksum."""
    (step / "trainer.pt").write_bytes(data)
    meta = json.loads((step / "meta.json").read_text())
    meta["sha256"]["trainer.pt"] = hashlib.sha256(data).hexdigest()
    (step / "meta.json").write_text(json.dumps(meta))


def hostile_weights(folder: Path, data: bytes) -> None:
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "pytorch_model.bin").write_bytes(data)


def hostile_adapter(folder: Path, data: bytes) -> None:
    adapter = folder / "recovery" / "adapter"
    for name in ("adapter_model.safetensors", "origin.json"):
        (adapter / name).unlink()
    (adapter / "adapter_model.bin").write_bytes(data)


def hostile_array(folder: Path, data: bytes) -> None:
    """Replace an array with one of objects, which numpy stores as a pickle."""
    with open(folder / "puzzles" / "train" / "all__inputs.npy", "wb") as file:
        np.save(file, np.array([Hostile()], dtype=object), allow_pickle=True)


def replace(folder: Path, data: bytes, name: str) -> None:
    (folder / name).write_bytes(data)


PICKLES = {
    "trainer.pt": (hostile_trainer, tuple(s.name for s in SUBJECTS if s.script != "build_kd_cache")),
    "student.pt": (partial(replace, name="student.pt"), ("recovery, KD", "recovery, SFT")),
    "best.pt": (partial(replace, name="qat/best.pt"), ("export, GGUF", "report", "completions", "perplexity")),
    "base.pt": (partial(replace, name="law4/base.pt"), ("legal assistant, int4",)),
    "adapter_model.bin": (hostile_adapter, ("export, merged", "completions")),
    "pytorch_model.bin": (hostile_weights, ("teacher cache", "QAT", "legal SFT", "GRPO", "completions")),
    "all__inputs.npy": (hostile_array, ("puzzles",)),
}


def hostile_trials(bench: Bench) -> Iterator[Trial]:
    for name, (_, tried_on) in PICKLES.items():
        for subject in (one.name for one in bench.chosen([BY_NAME[each] for each in tried_on])):
            for zipped in (False, True) if not name.endswith(".npy") else (False,):
                what = f"{name}, {'zip' if zipped else 'pickle'}"
                yield Trial(HOSTILE, subject, what, partial(hostile, name=name, zipped=zipped))


def hostile(bench: Bench, folder: Path, trial: Trial, name: str, zipped: bool) -> str:
    """The pickle must never be run, and must be refused by name."""
    subject = BY_NAME[trial.subject]
    if name == "trainer.pt":
        shutil.copytree(bench.interrupted(subject, subject.late), folder)
    else:
        bench.prepare(subject, folder)
    PICKLES[name][0](folder, pickled(zipped))
    ended = subject.start(folder).wait()
    if list(folder.rglob(MARK)):
        raise Unexpected("the code in it was run")
    # a command that uses a model may notice first that the model has changed
    check_refusal(ended, name, *(["change --model"] if name == "pytorch_model.bin" else []))
    if "weights_only" in ended.err:
        raise Unexpected(f"advises running its code: {said(ended)}")
    return "refused"
