"""What a GPU's driver tells of streams: which context is current, what a stream's number is, whether a graph is being captured on it."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from mkernel.memory.driver import check, prompt

__all__ = ["EAGER", "FORBIDDEN", "LEGACY_STREAM", "PER_THREAD_STREAM", "StreamQueries", "stream_name"]

LEGACY_STREAM = 1  # CU_STREAM_LEGACY; 0 means the same here, whatever the bindings were told
PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD: one handle, another stream in every thread
EAGER, FORBIDDEN = 0, -1  # in place of a capture's number, which is positive
_CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy stream, while another one is being captured
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


class _Answers(ctypes.Structure):
    """Where the driver's functions write; used under the lock."""

    _fields_ = [
        ("context", _pointer),
        ("status", ctypes.c_int),
        ("capture", ctypes.c_uint64),
        ("graph", _pointer),
        ("nodes", ctypes.POINTER(_pointer)),
        ("count", _size),
        ("stream_id", ctypes.c_uint64),
    ]


class StreamQueries:
    """Questions to the driver about streams of one GPU.

    All questions are asked under the lock, and all but ``is_current`` with the GPU's context current. None of them waits for anything, so
    that giving up the GIL would only cost time.
    """

    def __init__(self, context: Any) -> None:
        self.context, self.lock = context, threading.RLock()
        self._handle = int(context)
        self._answers = answers = _Answers()
        at = ctypes.addressof(answers)
        names = ("context", "status", "capture", "graph", "nodes", "count", "stream_id")
        self._at = {name: at + getattr(_Answers, name).offset for name in names}
        self._context_at, self._status_at = self._at["context"], self._at["status"]
        self._capture_at, self._id_at = self._at["capture"], self._at["stream_id"]
        self._get_context = prompt("cuCtxGetCurrent", _pointer)
        self._get_id = prompt("cuStreamGetId", _pointer, _pointer)
        # By its first name: with cuda-bindings 13 it has other parameters.
        self._get_capture = prompt("cuStreamGetCaptureInfo_v2", *(_pointer,) * 6)

    def is_current(self) -> bool:
        """Whether the GPU's context is the calling thread's."""
        return bool(self._get_context(self._context_at) == 0 and self._answers.context == self._handle)

    def _capture_of(self, stream: int) -> int:
        failed = self._get_capture(stream, self._status_at, self._capture_at, None, None, None)
        if failed:
            if failed == _CAPTURE_IMPLICIT:
                return FORBIDDEN
            check(failed, "asking whether a stream is being captured")
        status = self._answers.status
        if status == 0:
            return EAGER
        return int(self._answers.capture) if status == _ACTIVE else FORBIDDEN

    def _id_of(self, stream: int) -> int:
        """The number of a stream, which no later stream will have, as its handle may; 0: another in every thread."""
        if stream == LEGACY_STREAM:
            return -1  # there is one, for good, and it needs no question
        if stream == PER_THREAD_STREAM:
            return 0
        status = self._get_id(stream, self._id_at)
        if status:
            check(status, "asking for a stream's number")
        number: int = self._answers.stream_id
        return number + 1

    def _frontier(self, stream: int) -> list[int]:
        """The nodes that the next one of a captured stream will depend on; the graph is in the answers."""
        self._check(self._ask_for_graph(stream), "asking for the graph under capture")
        return self._nodes()

    def _frontier_if_told(self, stream: int) -> list[int] | None:
        """The same; None: the driver does not tell the dependencies of kernels that start before what they depend on has ended."""
        return self._nodes() if self._ask_for_graph(stream) == 0 else None

    def _nodes(self) -> list[int]:
        answers = self._answers
        return [int(answers.nodes[i] or 0) for i in range(answers.count)]

    def _follows(self, stream: int, node: int) -> bool:
        """Whether it is known that the next node of a captured stream depends on ``node`` anyway."""
        return node in (self._frontier_if_told(stream) or ())

    def _ask_for_graph(self, stream: int) -> int:
        at = self._at
        status: int = self._get_capture(stream, self._status_at, self._capture_at, at["graph"], at["nodes"], at["count"])
        return status

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status:
            check(status, what)


def stream_name(stream: int) -> str:
    """How messages call a stream."""
    return {LEGACY_STREAM: "the legacy default stream", PER_THREAD_STREAM: "the per-thread default stream"}.get(stream, hex(stream))
