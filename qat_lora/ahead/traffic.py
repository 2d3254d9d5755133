"""How many bytes a compiled program moves to and from HBM, counted in the compiler's final text.

The compiler's own figure, "bytes accessed", also counts what stays in the chip's vector memory (VMEM, marked S(1) in
the text), which has a much higher bandwidth, so it overstates the time that HBM takes.
"""

import re

SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "iota", "after-all", "partition-id", "replica-id",
}  # fmt: skip
CALLED = re.compile(
    r"\b(?:body|to_apply|calls|called_computations|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def hbm_bytes(program: str) -> float:
    """Bytes that one execution of a program (HLO text after optimisation) reads from and writes to HBM.

    Every instruction reads its operands and writes its results; a gather or a slice reads only as much as it returns,
    an update in place only what it changes, and an asynchronous copy what crosses between HBM and VMEM. The body of
    a loop counts once per iteration, or once if the compiler does not know how many there are; a conditional counts all
    its branches.
    """
    computations = _parse(program)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", program, re.MULTILINE)[1]
    return _moved(entry, computations, {})


def _parse(program: str) -> dict[str, list[tuple[str, str, str, str]]]:
    """{computation: its instructions as (name, type, operation, the rest)}."""
    found, lines = {}, []
    for line in program.splitlines():
        if match := COMPUTATION.match(line):
            lines = found[match[1]] = []
        elif match := INSTRUCTION.match(line):
            lines.append(match.groups())
    return found


def _bytes(kind: str, everywhere: bool = False) -> float:
    """Bytes of a type's tensors in HBM, or everywhere."""
    total = 0.0
    for name, sizes, layout in SHAPE.findall(kind):
        if everywhere or "S(" not in layout:
            bits = re.search(r"\d+", name)  # pred has none
            count = int(bits[0]) / 8 if bits else 1.0
            for size in filter(None, sizes.split(",")):
                count *= int(size)
            total += count
    return total


def _operands(rest: str) -> list[str]:
    """The names of an instruction's operands."""
    depth, end = 1, len(rest)
    for at, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            end = at
            break
    return re.findall(r"%([\w.\-]+)", rest[:end])


def _moved(name: str, computations: dict, known: dict) -> float:
    if name not in known:
        known[name] = 0.0
        kinds = {instruction[0]: instruction[1] for instruction in computations.get(name, ())}
        known[name] = sum(_cost(one, kinds, computations, known) for one in computations.get(name, ()))
    return known[name]


def _cost(instruction: tuple, kinds: dict[str, str], computations: dict, known: dict) -> float:
    _, kind, operation, rest = instruction
    if operation in FREE or operation.endswith("-done") or (operation == "custom-call" and "Bitcast" in rest):
        return 0.0
    if operation in ("while", "call", "conditional"):
        trips = int(match[1]) if (match := TRIPS.search(rest)) else 1
        called = re.findall(r"[\w.\-]+", " ".join(CALLED.findall(rest)))
        return trips * sum(_moved(each, computations, known) for each in called)
    operands = [kinds.get(operand, "") for operand in _operands(rest)]
    if operation.endswith("-start"):  # what arrives, once for each end in HBM; without the operand that it repeats
        target = [match[0] for match in SHAPE.finditer(kind)]
        target = target[1] if operation == "slice-start" and len(target) > 1 else target[0]
        return _bytes(target) + (_bytes(target, True) if operands and _bytes(operands[0]) else 0.0)
    if operation in ("gather", "dynamic-slice", "slice"):
        return _bytes(kind) + (_bytes(kind, True) if _bytes(operands[0]) else 0.0)
    if operation in ("dynamic-update-slice", "scatter"):
        update = operands[2 if operation == "scatter" else 1]
        return _bytes(update) + (2 * _bytes(update, True) if _bytes(kind) else 0.0)
    if operation == "fusion" and (match := re.search(r"calls=%?([\w.\-]+)", rest)):
        return _of_fusion(kind, operands, computations.get(match[1], ()))
    return _bytes(kind) + sum(map(_bytes, operands))


def _of_fusion(kind: str, operands: list[str], body: list[tuple]) -> float:
    """A fusion reads its operands and writes its results, less what a slice inside skips or an update leaves alone."""
    reads, writes = list(map(_bytes, operands)), _bytes(kind)
    numbers = {name: int(rest.split(")")[0]) for name, _, operation, rest in body if operation == "parameter"}
    kinds, source = {name: its for name, its, _, _ in body}, dict(numbers)
    uses: dict[int, list[float | None]] = {}
    for name, its, operation, rest in body:
        given = _operands(rest) if operation != "parameter" else []
        if operation in ("bitcast", "copy", "reshape") and given and given[0] in source:
            source[name] = source[given[0]]
            continue
        for place, operand in enumerate(given):
            if operand in source:
                number, part = source[operand], None
                if operation in ("gather", "dynamic-slice", "slice") and place == 0:
                    part = _bytes(its, True)
                elif operation in ("dynamic-update-slice", "scatter") and place == 0:
                    part = _bytes(kinds.get(given[2 if operation == "scatter" else 1], ""), True)
                    if number < len(reads) and reads[number]:
                        writes -= max(0.0, reads[number] - part)
                uses.setdefault(number, []).append(part)
    for number, parts in uses.items():
        if number < len(reads) and reads[number] and None not in parts:
            reads[number] = min(reads[number], sum(parts))
    return max(0.0, writes) + sum(reads)
