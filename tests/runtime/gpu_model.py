"""A model of a GPU's streams, events and graphs that knows what happens before what. CuPy and torch on it: gpu_libraries.py.

Work is a node with a set of nodes that have happened before it, so that "ordered" is a question to the model and not a matter of luck.
It is stricter than a GPU: the legacy stream waits for nobody, and what is not ordered is never ordered by accident.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

CONTEXT, ORDINAL = 7, 0
LEGACY, PER_THREAD = 1, 2
INVALID, NOT_READY, UNSUPPORTED, ISOLATION, IMPLICIT = 400, 600, 900, 905, 906


@dataclasses.dataclass
class GraphNode:
    kind: str  # "kernel", "wait", "record"
    what: Any  # a label, or an event
    before: set[int]


class Graph:
    """What a capture makes: nodes by number."""

    def __init__(self, number: int) -> None:
        self.number, self.nodes, self.ended = number, dict[int, GraphNode](), False


@dataclasses.dataclass
class Captured:
    """An event recorded inside a capture; not an external one."""

    graph: Graph
    nodes: frozenset[int]


class Stream:
    """A stream; ``blocking`` ones hold up the legacy stream while they are captured."""

    def __init__(self, number: int, blocking: bool) -> None:
        self.number, self.blocking = number, blocking
        self.last: set[int] = set()
        self.graph: Graph | None = None
        self.frontier: set[int] = set()


class Gpu:
    """The model. Its ``prompt`` stands for ``mkernel.memory.driver.prompt``."""

    def __init__(self) -> None:
        self.before: list[int] = []  # by node: the set of nodes before it and itself, as bits
        self.ran: list[tuple[Any, int]] = []  # kernels, in the order in which the host has launched them
        self._streams: dict[Any, Stream] = {}
        self._numbers = itertools.count(1)
        self._handles = itertools.count(0x1000, 16)
        self._graph_nodes = itertools.count(0x100000)
        self._graphs: dict[int, Graph] = {}
        self.events: dict[int, Any] = {}  # handle -> the nodes before its record, or Captured
        self.pending: set[int] = set()  # events that have not happened yet, as far as queries are told
        self._quick: set[int] | None = None  # after ``slow``: the only events that happen at once
        self.destroyed: list[int] = []
        self._kept: list[Any] = []
        self.calls: list[str] = []  # of the driver
        for special in (LEGACY, PER_THREAD):
            self._streams[special] = Stream(next(self._numbers), False)

    # ---- what a program does
    def stream(self, *, blocking: bool = False, handle: int | None = None) -> int:
        handle = next(self._handles) if handle is None else handle
        self._streams[handle] = Stream(next(self._numbers), blocking)
        return handle

    def destroy(self, stream: int) -> None:
        del self._streams[stream]

    def find(self, handle: int) -> Stream:
        key = (handle, threading.get_ident()) if handle == PER_THREAD else handle
        if handle == PER_THREAD and key not in self._streams:
            self._streams[key] = Stream(next(self._numbers), False)
        return self._streams[key]

    def work(self, stream: int, label: Any) -> int:
        """A kernel on a stream: its node, in a graph if the stream is being captured."""
        where = self.find(stream)
        assert not self._held_up(stream), "the legacy stream was used while a capture holds it up"
        if where.graph is not None:
            node = self._add(where.graph, GraphNode("kernel", label, set(where.frontier)))
            where.frontier = {node}
            return node
        node = self._node(where.last)
        where.last = {node}
        self.ran.append((label, node))
        return node

    def order(self, before: int, after: int) -> None:
        """``after`` waits for ``before``, as a program would say it."""
        event = self.event()
        assert self.prompt("cuEventRecord")(event, before) == 0
        assert self.prompt("cuStreamWaitEvent")(after, event, 0) == 0

    def event(self) -> int:
        handle = next(self._handles)
        self.events[handle] = None
        return handle

    def slow(self) -> None:
        """Events that are made from now on stay pending."""
        self._quick = set(self.events)

    def begin_capture(self, stream: int) -> None:
        where = self.find(stream)
        assert where.graph is None
        where.graph = Graph(next(self._numbers))
        where.frontier = set()

    def end_capture(self, stream: int) -> Graph:
        graph = self.find(stream).graph
        assert graph is not None
        unjoined = [
            s for s in self._streams.values() if s.graph is graph and not s.frontier <= self._reach(graph, self.find(stream).frontier)
        ]
        assert not unjoined, "a stream of the capture was not joined"
        for where in self._streams.values():
            if where.graph is graph:
                where.graph, where.frontier = None, set()
        graph.ended = True
        return graph

    def _reach(self, graph: Graph, nodes: set[int]) -> set[int]:
        found = set(nodes)
        for node in nodes:
            found |= self._reach(graph, graph.nodes[node].before)
        return found

    def replay(self, graph: Graph, stream: int) -> None:
        """Events are waited for as they are when the graph is launched, and recorded by its launch."""
        where, made, recorded = self.find(stream), dict[int, int](), dict[int, set[int]]()
        assert graph.ended
        assert where.graph is None
        todo = dict(graph.nodes)
        while todo:
            ready = [number for number, node in todo.items() if node.before <= made.keys()]
            assert ready, "the graph has a circle"
            for number in ready:
                node = todo.pop(number)
                before = {made[one] for one in node.before} or where.last
                if node.kind == "wait":
                    before = before | (self.events[node.what] or set())
                made[number] = self._node(before)
                if node.kind == "kernel":
                    self.ran.append((node.what, made[number]))
                if node.kind == "record":
                    assert node.what not in recorded, "two nodes of a graph record one event: nobody knows which is later"
                    recorded[node.what] = {made[number]}
        self.events.update(recorded)
        where.last = set(made.values()) | where.last

    def ordered(self, before: int, after: int) -> bool:
        return bool(self.before[after] >> before & 1)

    # ---- inside
    def _node(self, before: set[int]) -> int:
        bits = 1 << len(self.before)
        for node in before:
            bits |= self.before[node]
        self.before.append(bits)
        return len(self.before) - 1

    def _add(self, graph: Graph, node: GraphNode) -> int:
        number = next(self._graph_nodes)
        graph.nodes[number] = node
        self._graphs[graph.number] = graph
        return number

    def _held_up(self, stream: int) -> bool:
        return stream == LEGACY and any(one.graph is not None and one.blocking for one in self._streams.values())

    # ---- the driver
    def prompt(self, name: str, *types: Any) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self, f"_{name}")

        def counted(*arguments: Any) -> int:
            self.calls.append(name)
            return function(*(getattr(one, "value", one) for one in arguments))

        return counted

    def _cuCtxGetCurrent(self, out: int) -> int:  # noqa: N802
        _put(out, CONTEXT)
        return 0

    def _cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        where = self.find(stream)
        if self._held_up(stream):
            return IMPLICIT
        if self._quick is not None and event not in self._quick:
            self.pending.add(event)
        self.events[event] = Captured(where.graph, frozenset(where.frontier)) if where.graph is not None else set(where.last)
        return 0

    def _cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:  # noqa: N802
        where, what = self.find(stream), self.events[event]
        if self._held_up(stream):
            return IMPLICIT
        if flags & 1:
            assert where.graph is not None, "an external event outside a capture"
            where.frontier = {self._add(where.graph, GraphNode("wait", event, set(where.frontier)))}
        elif isinstance(what, Captured):
            assert not what.graph.ended, "an event of a capture that has ended"
            assert where.graph in (None, what.graph), "two captures were mixed"
            where.graph = what.graph
            where.frontier |= what.nodes
        elif where.graph is not None:
            return ISOLATION if what else 0
        elif what:
            where.last = {self._node(where.last | what)}
        return 0

    def _cuEventQuery(self, event: int) -> int:  # noqa: N802
        assert event in self.events, "an event that is gone"
        return NOT_READY if event in self.pending else 0

    def _cuStreamGetId(self, stream: int, out: int) -> int:  # noqa: N802
        if stream not in self._streams:
            return INVALID
        if self.find(stream).graph is not None:
            return UNSUPPORTED  # and the capture is lost
        _put(out, self.find(stream).number)
        return 0

    def _cuStreamGetCaptureInfo_v2(self, stream: int, status: int, number: int, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        if stream not in self._streams:
            return INVALID
        where = self.find(stream)
        if self._held_up(stream):
            return IMPLICIT
        ctypes.c_int.from_address(status).value = int(where.graph is not None)
        if where.graph is not None:
            _put(number, where.graph.number)
            if graph is not None:
                array = (ctypes.c_void_p * max(1, len(where.frontier)))(*where.frontier)
                self._kept.append(array)
                self._graphs[where.graph.number] = where.graph
                _put(graph, where.graph.number)
                _put(nodes, ctypes.addressof(array))
                _put(count, len(where.frontier))
        return 0

    def _cuStreamUpdateCaptureDependencies(self, stream: int, nodes: Any, count: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        where = self.find(stream)
        added = set(nodes[:count])
        assert where.graph is not None
        assert not added & where.frontier, "a dependency twice"
        where.frontier |= added
        return 0

    def _cuGraphAddEventRecordNode(self, out: Any, graph: int, nodes: Any, count: int, event: int) -> int:  # noqa: N802
        out[0] = self._add(self._graphs[graph], GraphNode("record", event, set(nodes[:count])))
        return 0

    def _cuGraphAddDependencies(self, graph: int, first: Any, then: Any, count: int) -> int:  # noqa: N802
        before = self._graphs[graph].nodes[then[0]].before
        assert first[0] not in before, "a dependency twice"
        before.add(first[0])
        return 0

    def _cuGraphRemoveDependencies(self, graph: int, first: Any, then: Any, count: int) -> int:  # noqa: N802
        self._graphs[graph].nodes[then[0]].before.remove(first[0])
        return 0

    # ---- the bindings
    @property
    def CUevent_flags(self) -> Any:  # noqa: N802
        return types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.event()

    def cuEventDestroy(self, event: int) -> tuple[int]:  # noqa: N802
        self.destroyed.append(int(event))
        del self.events[int(event)]
        return (0,)

    def CUresult(self, status: int) -> Any:  # noqa: N802
        return types.SimpleNamespace(name=f"status {status}")


def _put(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value
