"""What a cubin says about its kernel: registers, local and shared memory, parameters. Read from its ELF sections, so no tool is needed."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

__all__ = ["Resources", "resources"]


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses; bytes per thread for ``local_bytes``, per CTA for ``shared_bytes`` (static)."""

    registers: int  # per thread at launch; setmaxnreg moves them between warpgroups later
    local_bytes: int  # stack frame: 0 means no spills
    shared_bytes: int
    parameter_bytes: int


# Attributes of section .nv.info[.<kernel>]: a byte of format, a byte of attribute, 16 bits that hold the value or its size.
_SIZED = 4
_PARAMETER, _FRAME_SIZE, _REGISTERS = 0x17, 0x11, 0x2F
_PARAMETER_SIZE_SHIFT = 18  # in the last word of a _PARAMETER record; the bits below are address space and alignment
_HEADER_BYTES = 64  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym


def resources(cubin: bytes, kernel: str = "mkernel_entry") -> Resources:
    """Raises ValueError when this is no cubin or it has no such kernel."""
    sections = _sections(cubin)
    info = f".nv.info.{kernel}"
    if info not in sections:
        raise ValueError(f"no kernel {kernel} in this cubin of {len(cubin)} bytes")
    symbol = _symbol_index(cubin, sections, kernel)
    registers = local = parameters = 0
    for attribute, value in (*_attributes(sections[".nv.info"].data(cubin)), *_attributes(sections[info].data(cubin))):
        if attribute == _PARAMETER:
            parameters += int.from_bytes(value[8:12], "little") >> _PARAMETER_SIZE_SHIFT
        elif attribute in (_REGISTERS, _FRAME_SIZE) and len(value) == 8:
            of, number = struct.unpack("<II", value)
            if of == symbol and attribute == _REGISTERS:
                registers = number
            elif of == symbol:
                local = number
    shared = sections.get(f".nv.shared.{kernel}")
    return Resources(registers, local, shared.size if shared else 0, parameters)


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    offset: int
    size: int

    def data(self, file: bytes) -> bytes:
        return file[self.offset : self.offset + self.size]


def _sections(file: bytes) -> dict[str, _Section]:
    if file[:5] != b"\x7fELF\x02" or len(file) < _HEADER_BYTES:
        raise ValueError("not a cubin: no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", file, 0x28)
    entry, count, names = struct.unpack_from("<HHH", file, 0x3A)
    if names >= count or table + count * entry > len(file):
        raise ValueError("not a cubin: its section table is cut off")
    headers = [_SECTION.unpack_from(file, table + i * entry) for i in range(count)]
    text = headers[names][4]
    return {_string(file, text + header[0]): _Section(header[4], header[5]) for header in headers}


def _symbol_index(file: bytes, sections: dict[str, _Section], name: str) -> int:
    strings, symbols = sections[".strtab"].offset, sections[".symtab"]
    for i in range(symbols.size // _SYMBOL.size):
        if _string(file, strings + _SYMBOL.unpack_from(file, symbols.offset + i * _SYMBOL.size)[0]) == name:
            return i
    raise ValueError(f"no symbol {name} in this cubin")


def _string(file: bytes, offset: int) -> str:
    return file[offset : file.index(b"\0", offset)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        form, attribute, word = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == _SIZED:
            yield attribute, data[offset : offset + word]
            offset += word
        else:
            yield attribute, word.to_bytes(2, "little")
