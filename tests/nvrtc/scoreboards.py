"""Loads that wait for loads, by the control bits of SASS: what ptxas does not print, and no profiler is needed for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mkernel.jit import cuda

_LINE = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?P<text>[^;]*;)\s+/\* 0x[0-9a-f]{16} \*/\n\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/")
_CONTROL = 41  # the first of the control bits in an instruction's high word (Volta and later): stall 4, yield 1, then
_SETS, _WAITS = 5, 11  # the scoreboard that says when a result is there (3 bits, 7: none), and those that are waited for (6 bits)
_WHOLE = re.compile(r"LDG\.\S*128")


class Instruction(NamedTuple):
    text: str
    sets: int | None
    waits: frozenset[int]


def instructions(cubin: bytes) -> Iterator[Instruction]:
    """Those of a cubin in their order, with the scoreboards that they set and wait for."""
    sass = cuda.disassemble(cubin, "--print-instruction-encoding")
    assert sass is not None, "no nvdisasm: pip install 'mkernel[test]'"
    for found in _LINE.finditer(sass):
        control = int(found["high"], 16) >> _CONTROL
        number = control >> _SETS & 7
        waits = frozenset(i for i in range(6) if control >> _WAITS >> i & 1)
        yield Instruction(" ".join(found["text"].split()), None if number == 7 else number, waits)


def waiting_loads(cubin: bytes) -> list[str]:
    """Loads of 16 bytes from global memory that wait until one before them has come, which nothing else has waited for."""
    pending: set[int] = set()
    found = []
    for one in instructions(cubin):
        is_load = _WHOLE.search(one.text) is not None
        if is_load and pending & one.waits:
            found.append(one.text)
        pending -= one.waits
        if is_load and one.sets is not None:
            pending.add(one.sets)
    return found
