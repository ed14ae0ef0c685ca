"""Streams of one GPU: the launches of a world run in call order on whatever streams they come, also those that graphs replay.

One event, the *tail*, stands for everything that a world has launched. An eager call on another stream than the last one waits for it,
and records it anew. A graph waits for it before its first call of the world and records it after its last one, by an event wait node and
an event record node, so that every replay takes its place among the eager calls. docs/streams.md states what follows for programs.

Kernels of several worlds that do not fit on the GPU together run in call order, too (``join``): each waits for its peers with all of its
SMs, and two that begin in one order here and in the other order elsewhere would wait for each other.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from typing import Any

from mkernel.errors import ArgumentError
from mkernel.memory.driver import call, check, current, driver, prompt
from mkernel.runtime.cuda.events import happened, new_event, sleep_until
from mkernel.runtime.cuda.queries import EAGER, FORBIDDEN, StreamQueries, stream_name

__all__ = ["LaunchQueue", "Turn"]

_WAIT_EXTERNAL = 1  # CU_EVENT_WAIT_EXTERNAL: a node of the graph, not a dependency inside it
_ADD_DEPENDENCIES = 0  # CU_STREAM_ADD_CAPTURE_DEPENDENCIES
_MARK_EVERY, _MARKS = 16, 8  # launches between two marks, and marks that may be pending: at most 144 launches are pending
_CAPTURES = 256  # how many are remembered; the oldest one has long ended, and its number never comes again

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


class _Capture:
    """One graph under capture that holds calls of the world."""

    __slots__ = ("before", "last", "record")

    def __init__(self, last: int) -> None:
        self.before: list[int] | None = None  # what the next call will follow; None: the driver does not tell
        self.last = last  # the node of the last call; of the wait for the tail, before the first one
        self.record = 0  # the node that records the tail; 0: there is none yet


# What ``LaunchQueue.order`` has found out about the next launch: its stream, the stream's number, the capture it belongs to, and whether
# the GPU's context is the thread's own. A plain tuple, because every call makes one.
Turn = tuple[int, int, _Capture | None, bool]

_log = logging.getLogger("mkernel")
_joining = threading.Lock()
_joined: list[LaunchQueue] = []  # of all GPUs


class LaunchQueue(StreamQueries):
    """The order of one world's launches on one GPU. Methods may be called from any thread; they make the GPU's context current.

    ``order`` and ``launched`` enclose a launch on one thread, and one thread at a time is between them (the world's lock). What only they
    touch needs no other lock; the answers of the driver, which other threads ask too, are read under the queue's.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._node = (_pointer * 1)()
        self._target = (_pointer * 1)()
        # None of these waits for anything, so that giving up the GIL would only cost time.
        self._record = prompt("cuEventRecord", _pointer, _pointer)
        self._wait = prompt("cuStreamWaitEvent", _pointer, _pointer, ctypes.c_uint)
        # By their first names: with cuda-bindings 13 some of these have other parameters.
        self._update = prompt("cuStreamUpdateCaptureDependencies", _pointer, _pointer, _size, ctypes.c_uint)
        self._add_record = prompt("cuGraphAddEventRecordNode", _pointer, _pointer, _pointer, _size, _pointer)
        self._add_edge = prompt("cuGraphAddDependencies", _pointer, _pointer, _pointer, _size)
        self._remove_edge = prompt("cuGraphRemoveDependencies", _pointer, _pointer, _pointer, _size)
        self._captures: dict[int, _Capture] = {}  # by the driver's number of the capture
        self._marks: deque[int] = deque()
        self._spare: list[int] = []  # marks that have happened, to be used again
        self._held: deque[tuple[Any, object]] = deque()  # an event, and what must live until it has happened
        self._launches = 0
        self._last_id = 0  # number of the stream where the tail was recorded last; 0: none, or not known
        self._anything = False  # whether anything has been launched or captured
        self._replayable = False  # graphs may record the tail at any time
        self._ctas = self._room = 0  # see ``join``
        self._line: tuple[LaunchQueue, ...] = (self,)  # those whose launches take turns: this queue first
        self._is_awaited = False  # graphs of other queues wait for the tail
        with current(context):
            self._events = [new_event(), new_event()]
        self._tail, self._crossing = (int(event) for event in self._events)

    def here(self) -> Any:
        """``with queue.here():`` the GPU's context is the calling thread's, and another thread's capture does not matter."""
        return current(self.context)

    # ---- several worlds
    def join(self, ctas: int, room: int) -> None:
        """Say that kernels of this queue hold up to ``ctas`` of the GPU's ``room`` SMs while they wait for other ranks.

        Where all queues of a GPU that have said so need more than there are, launches of each run after those made before in the others.
        """
        with _joining:
            self._ctas, self._room = ctas, room
            _joined.append(self)
            self._arrange()
        if any(other._replayable for other in self._line[1:]):
            _log.warning("graphs captured before this world was opened do not wait for its calls: capture them again (docs/streams.md)")

    def _leave(self) -> None:
        with _joining:
            if self not in _joined:
                return
            _joined.remove(self)
            others, self._line = self._line[1:], (self,)
            self._arrange()
        for other in others:
            with other.lock:  # no launch there looks at this queue any more
                pass

    def _arrange(self) -> None:
        here = [queue for queue in _joined if queue._handle == self._handle]
        fit = sum(queue._ctas for queue in here) <= self._room
        for queue in here:
            queue._line = (queue,) if fit else (queue, *(other for other in here if other is not queue))

    # ---- a launch
    def order(self, stream: int) -> Turn:
        """Make what is launched next on ``stream`` run after everything launched before. Waits while too many launches are pending.

        Raises
        ------
        ArgumentError
            The stream cannot take a launch now.
        DriverError
            It is no stream.
        """
        if len(self._marks) >= _MARKS:
            self._wait_for_room()
        with self.lock:
            if self._get_context(self._context_at) == 0 and self._answers.context == self._handle:  # is_current()
                return self._order(stream, True)
            with current(self.context):
                return self._order(stream, False)

    def _order(self, stream: int, own: bool) -> Turn:
        answers = self._answers
        if self._get_capture(stream, self._status_at, self._capture_at, None, None, None) == 0 and answers.status == 0:  # no capture
            stream_id = self._id_of(stream)
            for queue in self._line:
                if (stream_id == 0 or stream_id != queue._last_id or queue._replayable) and queue._anything:
                    self._check(self._wait(stream, queue._tail, 0), "ordering two streams")
            return stream, stream_id, None, own
        number = self._capture_of(stream)
        if number == FORBIDDEN:
            rule = "cannot take a call now: its capture has failed, or it would wait for another stream, which is being captured"
            raise ArgumentError("stream", stream_name(stream), rule, "make the call on a stream of its own, or after the capture")
        # The driver tells no number of a stream that is being captured.
        return stream, 0, self._order_in_capture(stream, number), own

    def _order_in_capture(self, stream: int, number: int) -> _Capture:
        capture = self._captures.get(number)
        if capture is None:
            for queue in self._line:
                queue._is_awaited |= queue is not self
                self._check(self._wait(stream, queue._tail, _WAIT_EXTERNAL), "ordering a graph after earlier calls")
            while len(self._captures) >= _CAPTURES:
                del self._captures[next(iter(self._captures))]
            capture = self._captures[number] = _Capture(self._frontier(stream)[0])
        for queue in self._line:
            one = queue._captures.get(number)
            if one is not None and not self._follows(stream, one.last):
                self._node[0] = one.last
                self._check(self._update(stream, self._node, 1, _ADD_DEPENDENCIES), "ordering two streams of a capture")
        capture.before = self._frontier_if_told(stream)
        return capture

    def launched(self, turn: Turn) -> None:
        """Note that the launch has been made. Called on the thread of ``order``, with the context current."""
        stream, stream_id, capture, _ = turn
        self._anything = True
        if capture is not None:
            with self.lock:
                self._launched_in_capture(capture, stream)
            return
        status = self._record(self._tail, stream)
        if status:
            check(status, "recording an event")
        self._last_id = stream_id
        self._launches += 1
        if self._launches % _MARK_EVERY == 0:
            with self.lock:
                mark = self._spare.pop() if self._spare else self._new_mark()
                self._check(self._record(mark, stream), "recording an event")
                self._marks.append(mark)

    def _new_mark(self) -> int:
        self._events.append(new_event())
        return int(self._events[-1])

    def _launched_in_capture(self, capture: _Capture, stream: int) -> None:
        """Move the graph's only record of the tail behind this call, off the path from this call to the next.

        A call may have launched nothing: a copy of no rows. Then the record is where it belongs, and an edge to it that is there already
        would be refused.
        """
        frontier = self._frontier(stream)
        if frontier == capture.before:
            return
        self._replayable = True
        last, self._node[0] = capture.last, frontier[0]
        graph = self._answers.graph
        capture.last = int(self._node[0] or 0)
        what = "ordering later calls after a graph"
        if not capture.record:
            self._check(self._add_record(self._target, graph, self._node, 1, self._tail), what)
            capture.record = int(self._target[0] or 0)
            return
        self._target[0] = capture.record
        self._check(self._add_edge(graph, self._node, self._target, 1), what)
        self._node[0] = last
        self._check(self._remove_edge(graph, self._node, self._target, 1), what)

    # ---- between libraries
    def capturing(self, stream: int) -> bool:
        """Whether a graph is being captured on this stream."""
        with self.lock:
            if self.is_current():
                return self._capture_of(stream) > EAGER
            with current(self.context):
                return self._capture_of(stream) > EAGER

    def follow(self, stream: int, producer: int) -> None:
        """Make what comes on ``stream`` run after what is on ``producer`` now.

        In a capture, what lies outside it is not waited for: the graph's replays follow it in the order that the caller gives them.

        Raises
        ------
        ArgumentError
            The producer is being captured, and ``stream`` is not.
        """
        if stream == producer:
            return
        with self.lock, current(self.context):
            mine, its = self._capture_of(stream), self._capture_of(producer)
            if mine > EAGER and its <= EAGER:
                return
            if mine != its or its == FORBIDDEN:
                rule = (
                    "is where an operand comes from, and is being captured or held up by a capture; the call's stream is not part of that"
                )
                raise ArgumentError(
                    "stream", stream_name(producer), rule, "make the call on the stream that is captured, or after the capture"
                )
            self._cross(producer, stream)

    def lead(self, stream: int, consumer: int) -> None:
        """Make what comes on ``consumer`` run after what is on ``stream`` now; nothing if one of them is captured without the other."""
        if stream == consumer:
            return
        with self.lock, current(self.context):
            mine = self._capture_of(stream)
            if mine != FORBIDDEN and mine == self._capture_of(consumer):
                self._cross(stream, consumer)

    def _cross(self, before: int, after: int) -> None:
        self._check(self._record(self._crossing, before), "recording an event")
        self._check(self._wait(after, self._crossing, 0), "ordering two streams")

    def hold(self, stream: int, thing: object) -> None:
        """Keep ``thing`` alive until what is on ``stream`` now has ended. In a capture it does nothing: the graph's owner keeps things."""
        with self.lock, current(self.context):
            if self._capture_of(stream) == EAGER:
                event = new_event()
                self._held.append((event, thing))
                self._check(self._record(int(event), stream), "recording an event")
        self.release()

    def release(self) -> None:
        """Let go of what was held for calls that have ended. Any thread may call it at any time."""
        if not self._held:
            return
        done: list[object] = []  # dropped outside the lock, because their finalizers may run anything
        with self.lock, current(self.context):
            while self._held and happened(int(self._held[0][0])):
                event, thing = self._held.popleft()
                done.append(thing)
                call(driver().cuEventDestroy(event), "destroying an event")

    # ---- waiting
    def synchronize(self) -> None:
        """Wait until everything launched has ended, replays of graphs included: sleeping, and for nobody else's work."""
        sleep_until(self._idle)
        self.release()

    def _idle(self) -> bool:
        with self.lock, current(self.context):
            return not self._anything or happened(self._tail)

    def _wait_for_room(self) -> None:
        """Wait while too many launches are pending: at a full queue the driver would wait with the context locked, deaf to Ctrl-C."""
        sleep_until(self._has_room)

    def _has_room(self) -> bool:
        with self.lock, current(self.context):
            while self._marks and happened(self._marks[0]):
                self._spare.append(self._marks.popleft())
            return len(self._marks) < _MARKS

    def close(self) -> list[Any]:
        """The events, for the caller to destroy; nothing is held any more. What graphs of other worlds wait for stays."""
        self._leave()
        with self.lock:
            events = [event for event in self._events if not (self._is_awaited and int(event) == self._tail)]
            events += (event for event, _ in self._held)
            for kept in (self._events, self._marks, self._spare, self._held, self._captures):
                kept.clear()
            return events
