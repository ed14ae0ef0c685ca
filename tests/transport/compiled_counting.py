"""The compiled halves of srd's counting protocol by themselves, with the interface of those in Python."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from mkernel.jit.cpu import find_compiler
from mkernel.transport.compiled import Rule
from mkernel.transport.counting import WINDOW, ProtocolError
from tests.transport.compiled_bugs import KERNELS, Bug, planted

__all__ = ["halves"]

_SOURCE = """
#include "counting.hpp"
using namespace mkproxy;
using Release = void (*)(uint64_t, uint64_t);

struct Half : Incoming {
  using Incoming::Incoming;
  Release raise = nullptr;
  bool operator()(uint64_t offset, uint64_t value, Breach&) { raise(offset, value); return true; }
};

extern "C" {
Outgoing* out_new(uint64_t credits, uint64_t window) { return new Outgoing(credits, window); }
void out_delete(Outgoing* out) { delete out; }
uint64_t out_room(Outgoing* out) { return out->room(); }
int out_open(Outgoing* out) { return out->open(); }
void out_spend(Outgoing* out) { out->spend(); }
uint32_t out_begin(Outgoing* out, uint32_t channel) { return out->begin(channel); }
int out_update(Outgoing* out, uint64_t granted, uint64_t released, Breach* breach) { return out->update(granted, released, *breach); }

Half* in_new(uint64_t credits, uint64_t window, Release raise) {
  Half* half = new Half(credits, window);
  half->raise = raise;
  return half;
}
void in_delete(Half* half) { delete half; }
int in_due(Half* half) { return half->due(); }
void in_tell(Half* half, uint64_t* counts) {
  const auto [granted, released] = half->tell();
  counts[0] = granted, counts[1] = released;
}
int in_write(Half* half, uint32_t imm, Breach* breach) { return half->write(imm, *half, *breach); }
int in_announce(Half* half, uint32_t channel, uint32_t sequence, uint32_t writes, uint64_t offset, uint64_t value, Breach* breach) {
  return half->announce(channel, sequence, writes, offset, value, *half, *breach);
}
}
"""
_word, _number, _pointer = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
_Release = ctypes.CFUNCTYPE(None, _word, _word)


class _Breach(ctypes.Structure):
    _fields_ = [("rule", _word), ("channel", _word), ("sequence", _word), ("number", _word), ("limit", _word)]

    def error(self) -> ProtocolError:
        numbers = {name: getattr(self, name) for name in ("channel", "sequence", "number", "limit")}
        return ProtocolError.of(Rule(self.rule), **numbers)


def _build(bug: Bug | None, folder: Path) -> ctypes.CDLL:
    (folder / "halves.cpp").write_text(_SOURCE)
    if bug is not None:
        (folder / bug.file).write_text(planted(bug))
    command = [*find_compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{folder}", f"-I{KERNELS / 'proxy'}", f"-I{KERNELS}"]
    subprocess.run([*command, str(folder / "halves.cpp"), "-o", str(folder / "halves.so")], check=True)
    loaded = ctypes.CDLL(str(folder / "halves.so"))
    for name, result, arguments in (
        ("out_new", _pointer, (_word, _word)),
        ("out_delete", None, (_pointer,)),
        ("out_room", _word, (_pointer,)),
        ("out_open", ctypes.c_int, (_pointer,)),
        ("out_spend", None, (_pointer,)),
        ("out_begin", _number, (_pointer, _number)),
        ("out_update", ctypes.c_int, (_pointer, _word, _word, _pointer)),
        ("in_new", _pointer, (_word, _word, _Release)),
        ("in_delete", None, (_pointer,)),
        ("in_due", ctypes.c_int, (_pointer,)),
        ("in_tell", None, (_pointer, _pointer)),
        ("in_write", ctypes.c_int, (_pointer, _number, _pointer)),
        ("in_announce", ctypes.c_int, (_pointer, _number, _number, _number, _word, _word, _pointer)),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class _Outgoing:
    loop: ctypes.CDLL

    def __init__(self, credits: int, window: int = WINDOW) -> None:
        self._half, self._breach = self.loop.out_new(credits, window), _Breach()

    def __del__(self) -> None:
        self.loop.out_delete(self._half)

    @property
    def room(self) -> int:
        return int(self.loop.out_room(self._half))

    @property
    def open(self) -> bool:
        return bool(self.loop.out_open(self._half))

    def begin(self, channel: int) -> int:
        return int(self.loop.out_begin(self._half, channel))

    def spend(self) -> None:
        self.loop.out_spend(self._half)

    def update(self, granted: int, released: int) -> None:
        if not self.loop.out_update(self._half, granted, released, ctypes.byref(self._breach)):
            raise self._breach.error()


class _Incoming:
    loop: ctypes.CDLL

    def __init__(self, release: Callable[[int, int], object], credits: int, window: int = WINDOW) -> None:
        self._failure: BaseException | None = None

        def call(offset: int, value: int) -> None:
            try:
                release(offset, value)
            except BaseException as error:  # C cannot pass it on
                self._failure = self._failure or error

        self._call = _Release(call)
        self._half, self._breach = self.loop.in_new(credits, window, self._call), _Breach()
        self._counts = (_word * 2)()

    def __del__(self) -> None:
        self.loop.in_delete(self._half)

    @property
    def due(self) -> bool:
        return bool(self.loop.in_due(self._half))

    def tell(self) -> tuple[int, int]:
        self.loop.in_tell(self._half, self._counts)
        return self._counts[0], self._counts[1]

    def write(self, imm: int) -> None:
        self._after(self.loop.in_write(self._half, imm, ctypes.byref(self._breach)))

    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        put = channel, sequence, writes, signal_offset, signal_value
        self._after(self.loop.in_announce(self._half, *put, ctypes.byref(self._breach)))

    def _after(self, well: int) -> None:
        if self._failure is not None:
            raise self._failure
        if not well:
            raise self._breach.error()


@functools.cache
def halves(bug: Bug | None = None) -> tuple[type, type]:
    """The classes (Incoming, Outgoing), compiled with a planted bug, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        loop = _build(bug, Path(folder))
    return type("Incoming", (_Incoming,), {"loop": loop}), type("Outgoing", (_Outgoing,), {"loop": loop})
