"""Mutations that once survived, and others that matter most: each is made, beside those that are drawn."""

from __future__ import annotations

from tests.mutants.generate import Mutation

__all__ = ["NAMED"]


def _named(name: str, path: str, old: str, new: str) -> Mutation:
    """Found by its text, which must be in the file once."""
    return Mutation(f"mkernel/{path}", 0, 0, old, new, name)


_POISON = "self._poison()"
_IN_CHECK, _IN_TIMED = f"        {_POISON}\n        for call", f"            {_POISON}\n            taken"
_SURFACED = "                self.failures.surfaced = True\n"
_SAID_ONCE = f"{_SURFACED}                raise"
_BEFORE_READING = "            world.wait_for_kernels()\n            self._record_to(None)"
_STAGED = "        area.offset, area.bytes = offset, size"
_RESERVED = "world.heap.reserve(plan.workspace_bytes, plan.staging_bytes if more else 0)"
_REPORTED = "_NUMBERS.pack_into(header, _NUMBERS_AT, problem, rows, schedule)"

_LEFT_OUT = "                if max_rows is not None:\n                    raise\n                continue"

NAMED = (
    _named("a split must fit all sizes", "ops/schedule.py", _LEFT_OUT, "                raise"),
    _named(
        "classes without a kernel",
        "planner/choice.py",
        "        if not left:\n            return frozenset",
        "        if True:\n            return frozenset",
    ),
    _named(
        "K decides about parts", "planner/gather_plan.py", ' if "k" in self.specialize else topology.num_nodes == 1 < topology.size', ""
    ),
    _named("what was refused stays bound", "runtime/world.py", "                self.bound_calls.clear()\n", "                pass\n"),
    _named("what is remembered without end", "ops/schedule.py", "if len(known) >= most:", "if False:"),
    _named("the best of the ranks", "bench/worker.py", "return max(float(text)", "return min(float(text)"),
    _named("the first check without poison", "bench/worker.py", _IN_CHECK, _IN_CHECK.replace(_POISON, "pass")),
    _named("measurements without poison", "bench/worker.py", _IN_TIMED, _IN_TIMED.replace(_POISON, "pass")),
    _named("measurements unchecked", "bench/worker.py", "if name in ours:", "if False:"),
    _named("options of ranks may differ", "runtime/init.py", "    require_equal(infos)", "    pass"),
    _named("no watchdog", "runtime/failure_watch.py", "self._watchdog.start()", "pass"),
    _named("zeros that are not", "runtime/heap_arrays.py", "if zero and size:", "if False:"),
    _named("modules loaded beside a kernel", "runtime/prepared.py", "world.wait_for_kernels()  # modules", "pass  # modules"),
    _named("history not kept", "runtime/world.py", "self._history[call & (_HISTORY - 1)] = executable", "pass"),
    _named("a launch that fails is silent", "runtime/world.py", _SAID_ONCE, _SAID_ONCE.replace(_SURFACED, "")),
    _named("a trace is read while kernels write it", "runtime/recorder.py", _BEFORE_READING, "            self._record_to(None)"),
    _named("worlds of other sizes are let in", "runtime/ranks/handshake.py", "if size != self._own.size:", "if False:"),
    _named("MPI goes on", "runtime/ranks/mpi.py", "MPI.COMM_WORLD.Abort(code)", "pass"),
    _named("byte_offset ignored", "runtime/arrays/dlpack.py", "(tensor.data or 0) + tensor.byte_offset", "(tensor.data or 0)"),
    _named("no keepalive", "runtime/ranks/addresses.py", "connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)", "pass"),
    _named("worlds of other processes", "runtime/ending.py", "        world.disown()", "        pass"),
    _named(
        "whoever is told of anything is waited for", "runtime/cpu/rank_states.py", '== "waiting" and self._over[rank]():', '== "waiting":'
    ),
    _named("a compilation at a time", "jit/cache.py", "fcntl.flock(file, fcntl.LOCK_EX)", "pass"),
    _named("calls are not given back", "runtime/world.py", "            self._calls = call\n            raise", "            raise"),
    _named("a report is raised again", "runtime/call_errors.py", "self._block.reported = 0", "pass"),
    _named("calls stay skipped", "runtime/call_errors.py", "world.backend.write(control, _EPOCH.pack(said.epoch))", "pass"),
    _named("positions go on after an error", "runtime/call_errors.py", "self._base = (errors", "_ = (errors"),
    _named("a rank waits in a collective for one that raises", "runtime/world.py", "if self.problems.reports:", "if False:"),
    _named("rows left out of the check", "runtime/prepared.py", " + second * rows", ""),
    _named("schedule left out of the check", "runtime/prepared.py", " + third * schedule", ""),
    _named("the workspace is not reserved", "runtime/prepared.py", _RESERVED, "pass"),
    _named("an old staging area is freed", "runtime/prepared.py", _STAGED, f"        area.bytes and heap.free(area.offset)\n{_STAGED}"),
    _named("reports without problem and rows", "runtime/prepared.py", _REPORTED, _REPORTED.replace("problem, rows, schedule", "0, 0, 0")),
    _named("splits that fit some rows and not fewer", "planner/split.py", "        self._share(chosen, sm_count, step)\n", ""),
    _named("splits that reports do not know", "ops/schedule.py", "world.schedules[known.schedule] = choice.split, choice.tiling", "pass"),
    _named("tuned for one number of rows", "ops/schedule.py", "numbers = span(rows)", "numbers = range(rows, rows + 1)"),
    _named("a class is ready without its memory", "ops/schedule.py", "            problems.reserve(table.plans[of_class])\n", ""),
    _named("the memory of one size is the class's", "ops/schedule.py", "problems.reserve(table.plans[of_class])", "problems.reserve(plan)"),
    _named("a new size at any address", "ops/gemm.py", " or (a_address | b_address | c_address) % 16:", ":"),
    _named("new weights at any address", "ops/gemm.py", "a_address | b_address | c_address", "a_address | c_address"),
    _named("a new size over its a", "ops/gemm.py", "(c_address < a_end and a_address < c_end) or ", ""),
    _named("a new size over b", "ops/gemm.py", " or (c_address < b_address + self._b_bytes and b_address < c_end)", ""),
    _named("rows that do not fit", "ops/gemm.py", "rows * a_factor != a_rows or ", ""),
    _named("a form of one row", "ops/gemm.py", "if instance.rows > 1 else None", ""),
    _named("matrices without end", "ops/gemm.py", "if a_rows >= MOST_EXTENT or c_rows >= MOST_EXTENT:", "if False:"),
    _named("forms of other splits", "runtime/world.py", "            self.forms.clear()\n", ""),
    _named("libraries on other streams", "ops/call.py", "(not others or _all_on(queue, others))", "True"),
    _named("a plan of any rows", "ops/prepared_plan.py", "if self.max_rows is not None and rows > self.max_rows:", "if False:"),
    _named("a kernel for exact rows", "planner/reduce.py", "tiling or Tiling(), class_of(rows)", "tiling or Tiling(), rows"),
    _named(
        "no rows are in a class of their own",
        "planner/row_classes.py",
        "return _ENDS[bisect.bisect_left(_ENDS, rows)]",
        "return rows and _ENDS[bisect.bisect_left(_ENDS, rows)]",
    ),
    _named("sums beside clusters of two by two", "planner/reduce.py", "topology.num_nodes == 1 and 1 in asked", "topology.num_nodes == 1"),
    _named("classes that were not examined", "planner/choice.py", "in classes(EXAMINED_ROWS) if rows not in seconds", "in ()"),
    _named("clusters that share K need no room", "planner/gather_plan.py", "apart = not may_share or self.cluster_k > 1", "apart = True"),
    _named("kinds without neighbors in N", "planner/candidates.py", "tiling.cluster_n, tiling.cluster_k", "tiling.cluster_k"),
    _named("kinds without clusters that share K", "planner/candidates.py", "tiling.cluster_n, tiling.cluster_k", "tiling.cluster_n"),
    _named("kinds of swapped operands in turn", "planner/candidates.py", 'tiling.tiles_at_once, "swapped"', '"swapped"'),
    _named("low tiles are left out", "planner/candidates.py", "_MORE_TILE_ROWS = 8", "_MORE_TILE_ROWS = 7"),
    _named("tiles that fill their waves are left out", "planner/candidates.py", "max(least, filling))", "least)"),
    _named("all heights in one kernel", "planner/heights.py", "_MOST_OF_KERNEL // size[kind]", "_MOST"),
    _named("as many heights as there are", "planner/heights.py", " > _MOST:", " > 99 * _MOST:"),
    _named("heights that no class wants first", "planner/heights.py", "kind, low, high = min(lost", "kind, low, high = max(lost"),
    _named("a failure of the network is the wrong rank's", "runtime/failure_watch.py", "is None else details", "is not None else details"),
    _named("a pipe has not ended", "runtime/workers/relay.py", "self.ended or not part", "self.ended and not part"),
    _named("a short file is a cubin", "jit/cubin.py", '02" or len', '02" and len'),
    _named("compilers that nobody asked for are missed", "jit/cpu.py", "if words and command", "if words or command"),
    _named("misspelt variables are ignored silently", "runtime/options.py", "warn_once(f", "str(f"),
    _named("tiles of few rows are multiplied whole", "planner/predict_gemm.py", "plan.load_rows <= BLOCK_M // 2", "plan.load_rows < 0"),
    _named("few rows of all tiles are half multiplied", "planner/predict_gemm.py", "(plan.may_be_low or plan.shares == 1)", "True"),
    _named("alone a candidate must promise more", "planner/choice.py", "if rules.problem.topology.size == 1:", "if False:"),
    _named("a kernel that the rules have must promise more", "planner/choice.py", "1.0 if plan.spec == rules.spec else _WORTH", "_WORTH"),
    _named("heights that few classes are asked for", "planner/choice.py", "_HEIGHTS_PER_DOUBLING = 16", "_HEIGHTS_PER_DOUBLING = 4"),
    _named("no other kernel for want of a height", "planner/choice.py", "if mine.block_rows == plan.block_rows:", "if mine:"),
    _named("kernels of few heights are thought to have all", "planner/choice.py", "heights.get(one.plan.spec), machine)", "None, machine)"),
    _named("a cluster in a world of one is waited for", "planner/gemm.py", "alone and apart and cluster > 1", "False"),
    _named("as few clusters alone as between ranks", "planner/pairs.py", "_LEFT_OVER_ALONE = 11", "_LEFT_OVER_ALONE = 8"),
    _named("as many clusters between ranks as alone", "planner/pairs.py", "if alone and cluster % 4 == 0 else", "if True else"),
    _named("shares of K begin in a sector", "planner/predict_gemm.py", "operands._replace(k=", "operands._replace(a_row=8, k="),
    _named("each SM loads for itself", "planner/tile_cost.py", "_SMS_OF_TPC = 2", "_SMS_OF_TPC = 1"),
    _named("those that share K ask together", "planner/tile_cost.py", "if tile.sharing_k:", "if False:"),
    _named("what others load costs nearly as much", "planner/tile_cost.py", "_RECEIVED = 0.65", "_RECEIVED = 1.5"),
    _named("links are not waited for", "planner/predict_gemm.py", "end = max(end, start + entry + links)", "pass"),
    _named("rows that mates hand on cost nothing", "planner/predict_gemm.py", "begin + pushing + forwarding)", "begin + pushing)"),
    _named("switches carry everything", "planner/machine.py", "max(nodes - 1, beyond * self.oversubscription)", "(nodes - 1)"),
    _named("all entries by one put", "planner/predict_network.py", "others * max(network.issue, network.put)", "network.put"),
    _named("a put for all nodes", "planner/predict_network.py", "engine = others * math.ceil(", "engine = math.ceil("),
    _named(
        "any world runs",
        "bench/scale.py",
        'if world.size > (MOST_RANKS if op == "ring_attention" else MAX_RANKS) else []',
        "if False else []",
    ),
    _named(
        "a world counts its own ranks only",
        "runtime/opening/placement.py",
        "if len(set(told)) == len(mates) else place",
        "if False else place",
    ),
    _named("torch's device is unseen", "runtime/opening/target.py", "if torch is not None:", "if False:"),
    _named("a process is on two GPUs", "runtime/init.py", "probe=make_backend is None, in_use=in_use)", "probe=make_backend is None)"),
)
