"""The Python mirror of ``kernels_src/abi.h``: same names, same layout (``tests/unit/test_abi.py`` compares them)."""

from __future__ import annotations

import ctypes
import enum

__all__ = [
    "AHEAD_BYTES",
    "AHEAD_OFFSET",
    "CHECK_BITS",
    "COUNTED_OFFSET",
    "COUNTED_WORDS",
    "FLAG_BYTES",
    "HALTED",
    "MAX_RANKS",
    "PACKET_BYTES",
    "RING_SLOTS",
    "SCRATCH_WORDS",
    "SIGNAL_BYTES",
    "SIGNAL_FLAGS",
    "TAGGED_BYTES",
    "TRACE_FLAG_KIND_SHIFT",
    "TRACE_FLAG_LANE",
    "TRACE_LANES",
    "TRACE_PEER_SHIFT",
    "TRACE_ROLE_SHIFT",
    "CallReport",
    "Command",
    "ControlBlock",
    "Fields",
    "FlagKind",
    "HostBlock",
    "Ring",
    "Role",
    "SignalHeader",
    "State",
    "TensorMap",
    "TraceKind",
    "TraceRecord",
    "World",
]

MAX_RANKS = 512
SCRATCH_WORDS = 64
RING_SLOTS = 1024
CHECK_BITS = 24
HALTED = 1 << 63
TRACE_LANES = 4
TRACE_FLAG_LANE = 3
TRACE_FLAG_KIND_SHIFT, TRACE_ROLE_SHIFT, TRACE_PEER_SHIFT = 8, 12, 16  # in the kind of a record of that lane

_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


class Role(enum.IntEnum):
    compute = 0
    intra_comm = 1
    inter_send = 2
    inter_reduce = 3


class State(enum.IntEnum):
    running = 0
    timed_out = 1
    mismatch = 2
    aborted = 3


class FlagKind(enum.IntEnum):
    entry = 0
    chunk = 1
    ring_slot = 2
    ring_done = 3
    rows = 4  # nobody waits for them: there is no room


class TraceKind(enum.IntEnum):
    tile = 1
    wait = 2
    send = 3
    put = 4
    forward = 5
    reduce = 6
    fetch = 7
    route = 8
    flag = 9


class TensorMap(ctypes.Structure):
    _align_ = 64
    _fields_ = [("opaque", _u64 * 16)]


class Command(ctypes.Structure):
    _fields_ = [
        ("ticket", _u64),
        ("channel", _u32),
        ("dst_rank", _u32),
        ("src_offset", _u64),
        ("dst_offset", _u64),
        ("bytes", _u64),
        ("signal_offset", _u64),
        ("signal_value", _u64),
        ("reserved", _u64),
    ]


class Ring(ctypes.Structure):
    _fields_ = [
        ("completed", _u64),
        ("launched", _u64),
        ("ended", _u64),
        ("captured", _u64),
        ("reserved", _u64 * 4),
        ("slots", Command * RING_SLOTS),
    ]


class CallReport(ctypes.Structure):
    _fields_ = [
        ("epoch", _u64),
        ("problem", _u32),
        ("rows", _u32),
        ("schedule", _u32),
        ("reserved", _u32),
        ("details", _u64 * 3),
    ]


class HostBlock(ctypes.Structure):
    _fields_ = [
        ("state", _u32),
        ("reported", _u32),
        ("role", _u32),
        ("cta", _u32),
        ("flag_kind", _u32),
        ("flag_index", _u32),
        ("peer", _u32),
        ("problem", _u32),
        ("epoch", _u64),
        ("expected", _u64),
        ("seen", _u64),
        ("abort", _u64),
        ("rows", _u32),
        ("schedule", _u32),
        ("rank", _u32),
        ("reserved", _u32),
        ("report", CallReport),
    ]


class ControlBlock(ctypes.Structure):
    _fields_ = [
        ("epoch", _u64),
        ("ring_head", _u64),
        ("tile_counter", _u32),
        ("exit_counter", _u32),
        ("failed", _u32),
        ("reserved0", _u32),
        ("gathered", _u64),
        ("met", _u64),
        ("reserved1", _u64 * 10),
    ]


class SignalHeader(ctypes.Structure):
    _fields_ = [("entered", (_u64 * MAX_RANKS) * 2), ("abort", _u64), ("reserved", _u64 * 15), ("scratch", _u64 * SCRATCH_WORDS)]


SIGNAL_FLAGS = ctypes.sizeof(SignalHeader)
FLAG_BYTES = 4 << 20  # of the signal segment: the header, the flags of the ops, and last those that count within a call; then come
COUNTED_WORDS = 8192  # flags that count: of no other use, because other flags hold epochs
COUNTED_OFFSET = FLAG_BYTES - 8 * COUNTED_WORDS
PACKET_BYTES = 18 << 20  # packets: words that are data and flag at once; results of 8 MiB in two steps, and tiles that are not full


AHEAD_OFFSET = FLAG_BYTES + PACKET_BYTES  # last come packets that are sent before their rank has entered the call:
AHEAD_BYTES = 4 << 20  # so many, of each parity of the epoch
TAGGED_BYTES = 8 << 20  # behind both halves: tagged packets, which several CTAs read, likewise
SIGNAL_BYTES = AHEAD_OFFSET + 2 * (AHEAD_BYTES + TAGGED_BYTES)


class TraceRecord(ctypes.Structure):
    _fields_ = [("kind", _u32), ("argument", _u32), ("begin", _u64), ("end", _u64)]


class World(ctypes.Structure):
    _fields_ = [
        ("rank", _u32),
        ("size", _u32),
        ("node", _u32),
        ("num_nodes", _u32),
        ("local_rank", _u32),
        ("ranks_per_node", _u32),
        ("check", _u32),
        ("trace_capacity", _u32),
        ("problem", _u32),
        ("rows", _u32),
        ("schedule", _u32),
        ("launch", _u32),
        ("heap_base", _u64),
        ("heap_stride", _u64),
        ("signal_base", _u64),
        ("signal_stride", _u64),
        ("control", _u64),
        ("host", _u64),
        ("ring", _u64),
        ("trace", _u64),
        ("timeout_ns", _u64),
        ("entry_timeout_ns", _u64),
    ]


class Fields(ctypes.Structure):
    _fields_ = [
        ("n", _u32),
        ("k", _u32),
        ("intra_comm", _u32),
        ("inter_send", _u32),
        ("inter_reduce", _u32),
        ("ctas", _u32),
        ("reserved", _u32 * 2),
    ]
