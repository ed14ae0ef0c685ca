"""``mkernel/abi.py`` says the same as ``kernels_src/abi.h``: the compiler is asked, not the eye."""

from __future__ import annotations

import ctypes
import enum
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel import abi

HEADER = Path(__file__).parents[2] / "kernels_src" / "abi.h"
STRUCTURES = {name: value for name in abi.__all__ if isinstance(value := getattr(abi, name), type) and issubclass(value, ctypes.Structure)}
ENUMS = {name: value for name in abi.__all__ if isinstance(value := getattr(abi, name), type) and issubclass(value, enum.IntEnum)}
ENUM_PREFIX = {"Role": "k", "State": "k", "FlagKind": "kFlag", "TraceKind": "kTrace"}
CONSTANTS = {
    "kMaxRanks": abi.MAX_RANKS,
    "kRingSlots": abi.RING_SLOTS,
    "kScratchWords": abi.SCRATCH_WORDS,
    "kSignalFlags": abi.SIGNAL_FLAGS,
    "kCheckBits": abi.CHECK_BITS,
    "kAheadBytes": abi.AHEAD_BYTES,
    "kTaggedBytes": abi.TAGGED_BYTES,
    "kHalted": abi.HALTED,
    "kTraceLanes": abi.TRACE_LANES,
    "kTraceFlagLane": abi.TRACE_FLAG_LANE,
    "kTraceFlagKindShift": abi.TRACE_FLAG_KIND_SHIFT,
    "kTraceRoleShift": abi.TRACE_ROLE_SHIFT,
    "kTracePeerShift": abi.TRACE_PEER_SHIFT,
}


def _enumerator(enumeration: str, member: str) -> str:
    return ENUM_PREFIX[enumeration] + "".join(part.capitalize() for part in member.split("_"))


def _python_layout() -> dict[str, int]:
    """Name of a size, offset, enumerator or constant -> what Python thinks it is."""
    layout = dict(CONSTANTS)
    for name, structure in STRUCTURES.items():
        layout[f"sizeof(abi::{name})"] = ctypes.sizeof(structure)
        if not hasattr(structure, "_align_") or sys.version_info >= (3, 13):  # older ctypes ignores _align_: users of TensorMap pad
            layout[f"alignof(abi::{name})"] = ctypes.alignment(structure)
        for field, *_ in structure._fields_:
            layout[f"offsetof(abi::{name}, {field})"] = getattr(structure, field).offset
            layout[f"sizeof(abi::{name}::{field})"] = getattr(structure, field).size
    for name, enumeration in ENUMS.items():
        layout |= {_enumerator(name, member.name): member.value for member in enumeration}
    return layout


@pytest.fixture(scope="module")
def compiled_layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no host C++ compiler")
    folder = tmp_path_factory.mktemp("abi")
    prints = (f'std::printf("%s\\"{name}\\": %llu", comma, (unsigned long long)({_cpp(name)})); comma = ", ";' for name in _python_layout())
    body = "\n".join(['const char* comma = "{";', *prints, 'std::puts("}");'])
    source = f'#include <cstdio>\n#include "abi.h"\nint main() {{ {body} }}\n'
    (folder / "layout.cpp").write_text(source)
    subprocess.run([compiler, "-std=c++20", f"-I{HEADER.parent}", folder / "layout.cpp", "-o", folder / "layout"], check=True)
    return dict(json.loads(subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout))


def _cpp(name: str) -> str:
    return name if "(" in name else f"abi::{name}"


def test_layout(compiled_layout: dict[str, int]) -> None:
    assert _python_layout() == compiled_layout


def test_nothing_is_missing_in_python() -> None:
    """Every struct, field, enumerator and constant of the header has its mirror (a field forgotten at the end keeps all offsets right)."""
    text = re.sub(r"//.*", "", HEADER.read_text())
    structures = {
        name: re.findall(r"(\w+)(?:\[\w+\])*\s*[;,](?=[^}]*)", body)
        for name, body in re.findall(r"struct\s+(?:alignas\(\d+\)\s+)?(\w+)\s*\{(.*?)\n\};", text, re.DOTALL)
    }
    assert {name: [field for field, *_ in s._fields_] for name, s in STRUCTURES.items()} == structures
    enums = dict(re.findall(r"enum (\w+) : uint32_t \{(.*?)\};", text, re.DOTALL))
    written = {name: {e for e in re.findall(r"(k\w+) =", body) if e != "kNumRoles"} for name, body in enums.items()}
    assert {name: {_enumerator(name, m.name) for m in e} for name, e in ENUMS.items()} == written
    assert set(re.findall(r"constexpr \w+ (k\w+) =", text)) == set(CONSTANTS)
