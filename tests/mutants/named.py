"""Mutations that once survived, and others that matter most: each is made, beside those that are drawn."""

from __future__ import annotations

from tests.mutants.generate import Mutation

__all__ = ["NAMED"]


def _named(name: str, path: str, old: str, new: str) -> Mutation:
    """Found by its text, which must be in the file once."""
    return Mutation(f"mkernel/{path}", 0, 0, old, new, name)


_IN_CHECK, _IN_TIMED = "        self._poison()\n        for call", "            self._poison()\n            taken"
_SAID_ONCE = "                self._surfaced = True\n                raise"

NAMED = (
    _named("a bound call is always valid", "ops/call.py", "return self.executable.placement == self.placement", "return True"),
    _named("bound calls without end", "ops/call.py", "if len(bound) >= _MAX_BOUND:", "if False:"),
    _named("the best of the ranks", "bench/worker.py", "return max(float(text)", "return min(float(text)"),
    _named(
        "the first check without poison", "bench/worker.py", "        self._poison()\n        for call", "        pass\n        for call"
    ),
    _named(
        "measurements without poison",
        "bench/worker.py",
        "            self._poison()\n            taken",
        "            pass\n            taken",
    ),
    _named("measurements unchecked", "bench/worker.py", "if name in ours:", "if False:"),
    _named("options of ranks may differ", "runtime/assemble.py", "    require_equal(cards)", "    pass"),
    _named("no watchdog", "runtime/world.py", "self._watchdog.start()", "pass"),
    _named("zeros that are not", "runtime/world.py", "if zero and size:", "if False:"),
    _named("modules loaded beside a kernel", "runtime/world.py", "self._synchronize()  # modules", "pass  # modules"),
    _named("history not kept", "runtime/world.py", "self._history[call & (_HISTORY - 1)] = executable", "pass"),
    _named(
        "a launch that fails is silent",
        "runtime/world.py",
        "                self._surfaced = True\n                raise",
        "                raise",
    ),
    _named("MPI goes on", "runtime/mpi.py", "MPI.COMM_WORLD.Abort(code)", "pass"),
    _named("byte_offset ignored", "runtime/dlpack.py", "(tensor.data or 0) + tensor.byte_offset", "(tensor.data or 0)"),
    _named("no keepalive", "runtime/addresses.py", "connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)", "pass"),
    _named("worlds of other processes", "runtime/ending.py", "        world.disown()", "        pass"),
    _named("a compilation at a time", "jit/cache.py", "fcntl.flock(file, fcntl.LOCK_EX)", "pass"),
    _named("calls are not given back", "runtime/world.py", "            self._calls = call\n            raise", "            raise"),
)
