"""What the devices of a compiled program exchange, read from its HLO.

`collectives(text)` lists every collective operation with its bytes and how often it runs: those in the
body of a loop count once for each turn, where the compiler knows the number of turns.
"""

import math
import re
from typing import NamedTuple

KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
BYTES |= {"f64": 8, "s64": 8, "u64": 8}


class Collective(NamedTuple):
    """One collective operation of a program."""

    kind: str
    bytes: int  # of its result on one device
    times: float  # how often it runs; NaN inside a loop of unknown length
    in_loop: bool
    devices: int  # that take part in one exchange

    @property
    def sent(self) -> float:
        """The bytes that a device sends, all times together, with rings.

        An all-reduce of b bytes over n devices sends 2 b (n - 1) / n, an all-gather to b bytes half
        of that, a reduce-scatter to b bytes (n - 1) b.
        """
        n = self.devices
        share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
        return self.bytes * self.times * share.get(self.kind, (n - 1) / n)


def collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program, `lower(...).compile().as_text()`."""
    bodies, entry = _computations(text)
    found = []

    def visit(name: str, times: float, in_loop: bool) -> None:
        for line in bodies.get(name, ()):
            operation = re.search(rf"= (.*?) ({KINDS})(-start)?\(", line)
            if operation:
                result, kind = operation[1], operation[2]
                found.append(Collective(kind, _bytes(result), times, in_loop, _devices(line)))
            if loop := re.search(r"\bwhile\(.*body=%?([\w.\-]+)", line):
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
                visit(loop[1], times * (float(turns[1]) if turns else float("nan")), True)
                continue
            for names in re.findall(r"(?:to_apply|calls|_computations?)=(\{[^}]*|[^,\s]+)", line):
                for callee in re.findall(r"[\w.\-]+", names):
                    visit(callee, times, in_loop)

    visit(entry, 1.0, False)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Return the lines of each computation by name, and the name of the first to run."""
    bodies, entry, current = {}, "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            current = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return bodies, entry


def _bytes(shapes: str) -> int:
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
    return sum(BYTES[kind] * math.prod(map(int, filter(None, n.split(",")))) for kind, n in found)


def _devices(line: str) -> int:
    """Return how many devices take part, in any of the three ways in which XLA writes it."""
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):  # {{0,1},{2,3}}
        return len(groups[1].split(","))
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", line):  # [2,4]<=[8]
        return int(groups[1])
    if groups := re.search(
        r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", line
    ):  # mesh['a'=2,'b'=4] {'b'}
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
        taken = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", groups[2])
        return math.prod(int(part or sizes[name]) for name, part in taken)
    raise ValueError(f"the devices of a collective cannot be read: {line:.300}")
