"""Each rule of docs/memory_model.md broken once: one line of the device code changed, and the checks must say so.

The device code is copied, one line is replaced, and a fused GEMM runs on target cpu over a few seeds (planted.py). A wrong result, a
complaint of the emulator, a deadlock or a data race counts as found.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from mkernel import env
from mkernel.jit.headers import kernels_src
from tests.ops import planted
from tests.ops.body import topology
from tests.sanitizer import libtsan

_ROOT = Path(__file__).parents[2]
_REPORTS = ("wrong: ", "Error: target cpu: ", "MismatchError: ", "TransportError: ", "TimeoutError: ")  # but for deadlocks


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """One line of ``file`` changed: ``before`` occurs there and becomes ``after``."""

    name: str
    file: str
    before: str
    after: str = ""
    found_as: str = ""  # part of what must be reported
    world: str = "1x2"
    workload: str = "tiles"
    seeds: int = 8
    tsan: bool = False
    slow: bool = False
    missed: str = ""  # why it is not found
    also: tuple[tuple[str, str], ...] = ()  # other lines of the file that change with it
    sms: int = 4  # CTAs that a rank runs at once

    def plant(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text()
        for before, after in ((self.before, self.after), *self.also):
            assert text.count(before) == 1, f"{self.file} has {text.count(before)} times: {before}"
            text = text.replace(before, after)
        path.write_text(text)


_ENTERS = "wait_all(call, EntryFlags{}, call.world.size - 1)); }"

BUGS = [
    # The chunk flag is raised for data that is not there yet, or seen too early.
    Bug("flag before the last data", "copy.cuh", "    ptx::store_wait<0>();\n    while (behind", "    while (behind"),
    Bug("flag before the data", "copy.cuh", "        ptx::store_wait<kPiecesBehind>();\n"),
    Bug(
        "tiles do not wait for chunks",
        "gemm.cuh",
        "        if (ok) ok = op.wait_inputs(*entered, c, part);\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "only the first part of a tile is waited for",
        "gemm.cuh",
        "      if (op.waits(c, part)) {",
        "      if (op.waits(c, part) && part == 0) {",
        workload="parts",
    ),
    Bug(
        "forwarded before it has come",
        "allgather_gemm.cuh",
        "    if (!wait_chunk(entered, p, pushed_source(p, item), pushed_chunk(p, item))) return;\n",
        world="2x2",
    ),
    Bug(
        "a warp's flag before all lanes have stored",
        "copy.cuh",
        "  ptx::sync_warp();  // all lanes have stored\n",
        workload="warps short",
    ),
    # Entering a call.
    *(
        Bug(f"nobody waits for entries: {workload} on {world}", "sync.cuh", _ENTERS, "true); }", world=world, workload=workload, seeds=40)
        for world, workload in (
            ("1x2", "short"),
            ("1x2", "warps short"),
            ("1x2", "reduce short"),
            ("1x8", "packets short in one step"),
        )
    ),
    Bug(
        "the thread that sends does not wait for entries",
        "sync.cuh",
        "ok = EntryFlags{}.wait(call, i);",
        "ok = true;",
        world="4x1",
        workload="short",
        seeds=40,
    ),
    Bug(
        "only the owner of the memory, and its rail, are waited for",
        "sync.cuh",
        "(const Call& call, uint32_t i) const { return wait_entered(call, (call.world.rank + 1 + i) % call.world.size); }",
        "(const Call& call, uint32_t i) const {\n"
        "    const uint32_t peer = (call.world.rank + 1 + i) % call.world.size, per_node = call.world.ranks_per_node;\n"
        "    const bool near = peer / per_node == call.world.node || peer % per_node == call.world.local_rank;\n"
        "    return !near || wait_entered(call, peer);\n"
        "  }",
        world="2x2",
        workload="all-reduce, then gather",
        seeds=40,
        sms=8,
    ),
    Bug(
        "a shard is staged in the gather buffer, before others have entered",
        "allgather_gemm.cuh",
        "own_copy(p, index, p.send_offset); }",
        "own_copy(p, index, plane_offset(p, p.world.rank)); }",
        also=(("src = p.send_offset + offset,", "src = plane_offset(p, p.world.rank) + offset,"),),
        world="2x2",
        workload="all-reduce, then gather from ordinary memory",
        seeds=40,
    ),
    Bug(
        "entries have the deadline of other waits",
        "sync.cuh",
        "wait_word(call, entry_flag(call, peer), entered, expected, what, call.world.entry_timeout_ns);",
        "wait_word(call, entry_flag(call, peer), entered, expected, what, call.world.timeout_ns);",
        found_as="TimeoutError",
        world="2x2",
        workload="late",
    ),
    Bug(
        "the call ends before its puts",
        "ring.cuh",
        "  if (last_put != 0) wait_put(call, last_put, last_peer);",
        world="4x1",
        workload="slow",
    ),
    # Bulk stores.
    Bug(
        "a block is overwritten while it is stored",
        "gemm.cuh",
        "      ptx::store_wait_read<Shape::kResultBuffers - 1>();  // the oldest has been read\n",
        workload="reduce exactly",  # more blocks than buffers
    ),
    Bug(
        "a tile's last block is overwritten while it is stored",
        "gemm.cuh",
        "    ptx::store_wait_read<0>();\n    while (on_their_way",
        "    while (on_their_way",
    ),
    Bug("a piece is overwritten", "copy.cuh", "        ptx::store_wait_read<kPieceStages - kPiecesAhead>();\n", world="1x4"),
    Bug(
        "nobody waits for the result's stores",
        "gemm.cuh",
        "    ptx::store_wait_read<0>();\n    while (on_their_way > 0) give_back();\n  }\n",
        "    while (on_their_way > 0) give_back();\n  }\n",
        found_as="bulk stores in flight",
    ),
    Bug(
        "one buffer for results", "gemm.cuh", "    return storage.result[warpgroup][at.index];", "    return storage.result[warpgroup][0];"
    ),
    # Barriers.
    Bug(
        "a stage is never given back",
        "gemm.cuh",
        "    if (previous != nullptr && reports) ptx::mbarrier_arrive(previous);\n",
        found_as="deadlock",
    ),
    Bug("a stage is given back before it is read", "gemm.cuh", "    ptx::wgmma_wait<1>(d);\n"),
    Bug("nobody waits for a stage", "gemm.cuh", "    ptx::mbarrier_wait(&storage.stage_filled[stage.index], stage.parity);\n"),
    Bug(
        "a block is written while the last one is stored",
        "gemm.cuh",
        "    ptx::mbarrier_wait(&storage.block_stored[warpgroup][at.index], at.parity ^ 1);\n",
    ),
    Bug(
        "a block is stored before it is written",
        "gemm.cuh",
        "        ptx::mbarrier_wait(&storage.block_written[w][at.index], at.parity);\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "a block is stored before all lanes have written it",
        "gemm.cuh",
        "    ptx::sync_warp();\n    if (lane == 0) ptx::mbarrier_arrive(&storage.block_written",
        "    if (lane == 0) ptx::mbarrier_arrive(&storage.block_written",
    ),
    Bug(
        "a block is never given back", "gemm.cuh", "ptx::mbarrier_arrive(&storage.block_stored[w][stored.index]);", ";", found_as="deadlock"
    ),
    Bug(
        "a tile's slot is given back too early",
        "gemm.cuh",
        "  if constexpr (By == Reader::kWarp) ptx::sync_warp();",
        workload="chunks",  # of so few k steps that a warp can be a tile behind
        seeds=40,
    ),
    Bug(
        "a tile is never asked for",
        "gemm.cuh",
        "      if (step == ask_at) ptx::mbarrier_arrive(&storage.tile_wanted);\n",
        found_as="deadlock",
    ),
    Bug(
        "no tile is asked for after a sum",
        "gemm.cuh",
        "    if (part == 0 && steps == 0) ptx::mbarrier_arrive(&storage.tile_wanted);\n",
        found_as="deadlock",
        world="2x2",
        workload="reduce",
    ),
    Bug(
        "a CTA begins before its barriers are ready",
        "gemm.cuh",
        "gemm_init(storage);\n  ptx::sync_cta();\n",
        "gemm_init(storage);\n",
        found_as="not been initialized",
    ),
    # Proxies.
    Bug("no proxy fence before tiles are loaded", "gemm.cuh", "    ptx::fence_proxy_async();", found_as="missing fence.proxy.async"),
    Bug(
        "no proxy fence before forwarding",
        "allgather_gemm.cuh",
        "    ptx::fence_proxy_async();  // here, not in the thread that copies: it would wait for its copies\n",
        found_as="missing fence.proxy.async",
        world="2x2",
    ),
    Bug(
        "no proxy fence before a result is stored",
        "gemm.cuh",
        "    ptx::fence_proxy_async_shared();\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "no proxy fence when a communication CTA joins compute",
        "copy.cuh",
        "ptx::fence_proxy_async_shared(); }  // shared memory changes hands",
        "}  // shared memory changes hands",
        missed="nothing goes wrong: a bulk copy that has completed has executed this fence itself (PTX ISA, async proxy)",
    ),
    # Partial tiles, sums and finished tiles.
    Bug(
        "a partial tile's flag before its data",
        "gemm.cuh",
        "        ptx::store_wait<0>();\n        storage",
        "        storage",
        workload="reduce",
    ),
    Bug(
        "a finished tile's flag before its data",
        "gemm.cuh",
        "        ptx::store_wait<0>();\n        storage",
        "        storage",
        workload="two shot",
    ),
    Bug(
        "nobody waits for partial tiles",
        "reduce.cuh",
        "    return wait_all(entered, AddendFlags{*this, c}, addends(c, part));",
        "    return true;",
        workload="reduce",
    ),
    Bug(
        "sums of nodes do not wait for partial tiles",
        "reduce.cuh",
        "return part == 1 || c.is_sum; }",
        "return part == 1; }",
        world="2x2",
        workload="reduce",
    ),
    Bug(
        "the last partial tile is not waited for",
        "reduce.cuh",
        "AddendFlags{*this, c}, addends(c, part));",
        "AddendFlags{*this, c}, addends(c, part) - 1);",
        world="1x4",
        workload="reduce",
    ),
    Bug(
        "a node's sum is forgotten",
        "reduce.cuh",
        "return part == 1 ? kR - 1 + kNodes - 1 : 0;",
        "return part == 1 ? kR - 1 : 0;",
        world="2x2",
        workload="reduce",
    ),
    Bug(
        "a sum begins with what was there",
        "gemm.cuh",
        "        for (float& e : d) e = 0.0f;\n",
        "        ;\n",
        world="2x2",
        workload="reduce",
    ),
    Bug(
        "a partial tile without a flag",
        "reduce.cuh",
        "    raise_flag_of(entered, p, flag, c.is_sum ? p.world.local_rank : adder(c));\n",
        workload="reduce",
        found_as="deadlock",
    ),
    Bug(
        "the next call's epoch",
        "world.cuh",
        "  ptx::store_release_sys(reinterpret_cast<uint64_t*>(word), entered.call().epoch);",
        "  ptx::store_release_sys(reinterpret_cast<uint64_t*>(word), entered.call().epoch + 1);",
        workload="reduce short",
    ),
    Bug(
        "partial tiles go to ranks that have not entered",
        "sync.cuh",
        "    ptx::mbarrier_wait(&opened, 0);\n    return MaybeEntered(call, refused == 0);",
        "    return MaybeEntered(call, refused == 0);",
        workload="reduce short",
        seeds=40,
    ),
    Bug(
        "a put before its sums",
        "reduce.cuh",
        "      if (!wait_flag(entered, p, tiles.flag(distance, first + i), p.world.rank)) return false;\n",
        world="2x2",
        workload="reduce",
    ),
    Bug(
        "a put before its finished tiles",
        "reduce.cuh",
        "      if (!wait_flag(entered, p, tiles.flag(distance, first + i), p.world.rank)) return false;\n",
        world="2x2",
        workload="two shot",
    ),
    Bug(
        "the call ends before its puts of sums",
        "ring.cuh",
        "  if (last_put != 0) wait_put(call, last_put, last_peer);",
        world="4x1",
        workload="reduce slow",
        found_as="is reading",
    ),
    Bug(
        "a stage is read before a partial tile has come",
        "gemm.cuh",
        "  ptx::mbarrier_wait(&storage.stage_filled[stage.index], stage.parity);\n  add_stage",
        "  add_stage",
        workload="reduce",
    ),
    Bug(
        "a stage is given back before all lanes have added",
        "gemm.cuh",
        "  ptx::sync_warp();  // all lanes have read\n",
        workload="reduce exactly",
        seeds=24,
    ),
    Bug(
        "a stage of a partial tile is never given back",
        "gemm.cuh",
        "  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&storage.stage_consumed[stage.index]);\n",
        workload="reduce exactly",
        found_as="deadlock",
    ),
    Bug(
        "a partial tile is loaded into a stage in use",
        "gemm.cuh",
        "        ptx::mbarrier_wait(&storage.stage_consumed[stage.index], stage.parity ^ 1);\n        load_addend",
        "        load_addend",
        workload="reduce exactly",
    ),
    Bug(
        "no proxy fence before partial tiles are loaded",
        "gemm.cuh",
        "    ptx::fence_proxy_async();",
        found_as="missing fence.proxy.async",
        workload="reduce",
    ),
    Bug(
        "no proxy fence before a partial tile is stored",
        "gemm.cuh",
        "    ptx::fence_proxy_async_shared();\n",
        found_as="missing fence.proxy.async",
        workload="reduce",
    ),
    Bug(
        "a finished tile is pulled before it is there",
        "gemm_allreduce.cuh",
        "    if (!pulled.wait(entered, u)) return;\n",
        workload="two shot",
    ),
    Bug(
        "no proxy fence before a finished tile is pulled",
        "gemm_allreduce.cuh",
        "    ptx::fence_proxy_async();  // here, not in the thread that copies: it would wait for its copies\n",
        found_as="missing fence.proxy.async",
        workload="two shot",
    ),
    Bug(
        "nobody is told of a forwarded tile",
        "gemm_allreduce.cuh",
        " storage.announce.push(entered, forwarding, pulled.flag(u));",
        " {}",
        found_as="deadlock",
        world="2x2",
        workload="two shot",
    ),
    Bug(
        "one shot does not wait",
        "gemm_allreduce_one_shot.cuh",
        "    return wait_all(entered, SlotFlags{p, c.index}, kWorldSize);",
        "    return true;",
        workload="one shot",
    ),
    Bug(
        "one shot puts what is not there yet",
        "gemm_allreduce_one_shot.cuh",
        "      if (!wait_flag(entered, p, first + i, p.world.rank)) return false;\n",
        world="2x2",
        workload="one shot",
    ),
    Bug(
        "one shot ends before its puts",
        "ring.cuh",
        "  if (last_put != 0) wait_put(call, last_put, last_peer);",
        world="4x1",
        workload="one shot slow",
        found_as="is reading",
    ),
    # Packets.
    Bug(
        "packets are not waited for",
        "gemm_allreduce_packets.cuh",
        "        if (!here) missing = i;\n",
        found_as="wrong",
        workload="packets",
    ),
    Bug(
        "only the first word of a packet is looked at",
        "gemm_allreduce_packets.cuh",
        "(word[0] != 0) & (word[1] != 0) & (word[2] != 0) & (word[3] != 0);",
        "word[0] != 0;",
        found_as="wrong",
        workload="packets",
    ),
    Bug(
        "a word of a packet is not looked at",
        "gemm_allreduce_packets.cuh",
        " & (word[2] != 0) & ",
        " & ",
        found_as="wrong",
        workload="packets",
    ),
    Bug(
        "only one source's packets are waited for",
        "gemm_allreduce_packets.cuh",
        "        if (!here) missing = i;\n",
        "        if (!here && i < kPackets) missing = i;\n",
        found_as="wrong",
        world="1x3",
        workload="packets in one step",
    ),
    Bug(
        "words are not inverted",
        "gemm_allreduce_packets.cuh",
        "~ptx::pack<Shape::kElement>(d[e], d[e + 1]);\n    }\n    return v;\n  }\n"
        "  MK_DEVICE static void values_of(uint32_t word, float& low, float& high) { ptx::unpack<Shape::kElement>(~word, low, high); }",
        "ptx::pack<Shape::kElement>(d[e], d[e + 1]);\n    }\n    return v;\n  }\n"
        "  MK_DEVICE static void values_of(uint32_t word, float& low, float& high) { ptx::unpack<Shape::kElement>(word, low, high); }",
        found_as="deadlock",
        workload="packets",  # of its second tile only 8 columns exist: the others are zeros
    ),
    Bug(
        "no zeros are left behind",
        "gemm_allreduce_packets.cuh",
        "ptx::store_packet(at(i), ptx::Words{});",
        ";",
        found_as="wrong",
        workload="packets short",
    ),
    Bug(
        "zeros are left before words are looked for",
        "gemm_allreduce_packets.cuh",
        "    Patience patience(entered.call(), p.world.timeout_ns);\n",
        "    for (uint32_t i = 0; i < Sources * kPackets; ++i) ptx::store_packet(at(i), ptx::Words{});\n"
        "    Patience patience(entered.call(), p.world.timeout_ns);\n",
        found_as="deadlock",
        workload="packets",
    ),
    Bug(
        "zeros are left where the next row is",
        "gemm_allreduce_packets.cuh",
        "ptx::store_packet(at(i), ptx::Words{});",
        "ptx::store_packet(from + i * 32, ptx::Words{});",
        workload="packets in one step",
    ),
    Bug(
        "packets go to ranks that have not entered",
        "sync.cuh",
        "    ptx::mbarrier_wait(&opened, 0);\n    return MaybeEntered(call, refused == 0);",
        "    return MaybeEntered(call, refused == 0);",
        world="1x8",
        workload="packets short in one step",
        seeds=40,
    ),
    Bug(
        "the last row is not sent",
        "gemm_allreduce_packets.cuh",
        "      if (row + half * 8 >= p.rows) continue;\n",
        "      if (row + half * 8 + 1 >= p.rows) continue;\n",
        found_as="deadlock",
        workload="packets",
    ),
    Bug(
        "a row that is not there is sent",
        "gemm_allreduce_packets.cuh",
        "      if (row + half * 8 >= p.rows) continue;\n",
        found_as="wrong",
        workload="packets short",
    ),
    Bug(
        "a row that is not there is waited for",
        "gemm_allreduce_packets.cuh",
        "      if (row < p.rows) add_all<0>(entered, d, from, all);\n",
        "      add_all<0>(entered, d, from, all);\n",
        found_as="deadlock",
        workload="packets in one step",
    ),
    Bug(
        "own values are added unrounded",
        "gemm_allreduce_packets.cuh",
        "          values_of(v[s * kPackets + i].word[j], x, y);\n",
        "          values_of(v[s * kPackets + i].word[j], x, y);\n          if (s == p.world.rank) x = d[e], y = d[e + 1];\n",
        found_as="ranks have different bits",
        workload="packets in one step",
    ),
    Bug(
        "sums overlap what they are made of",
        "gemm_allreduce_packets.cuh",
        "sums = kWorldSize * owned();",
        "sums = 0;",
        world="1x3",
        workload="packets",
    ),
    # The end of a call.
    Bug("the tile counter is not reset", "sync.cuh", "    control->tile_counter = 0;\n"),
    Bug("the epoch does not advance", "sync.cuh", "    control->epoch = call.epoch;\n"),
    # What only ThreadSanitizer sees: on this host's processor every store is a release.
    Bug(
        "a relaxed flag",
        "cpu/ptx.cuh",
        "  __atomic_store_n(p, v, __ATOMIC_RELEASE);\n",
        "  __atomic_store_n(p, v, __ATOMIC_RELAXED);\n",
        "data race",
        tsan=True,
    ),
    Bug(
        "a relaxed wait",
        "cpu/ptx.cuh",
        "  const T v = __atomic_load_n(p, __ATOMIC_ACQUIRE);\n",
        "  const T v = __atomic_load_n(p, __ATOMIC_RELAXED);\n",
        "data race",
        tsan=True,
        slow=True,
    ),
    Bug(
        "a lane goes ahead of another lane's acquire",
        "sync.cuh",
        "  ptx::sync_warp();  // a vote orders no memory\n",
        found_as="data race",
        workload="warps short",
        tsan=True,
    ),
    Bug(
        "ordinary stores of zeros",
        "gemm_allreduce_packets.cuh",
        "ptx::store_packet(at(i), ptx::Words{});",
        "ptx::store_global(at(i), ptx::Words{});",
        found_as="data race",
        workload="packets",
        tsan=True,
    ),
    Bug("a flag's slot is given back too early", "handover.cuh", "      ptx::sync_warp();\n", found_as="data race", tsan=True),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the device code; at the same place for all bugs, so that only what has changed is compiled again."""
    return tmp_path_factory.mktemp("planted") / "kernels_src"


@pytest.fixture(autouse=True)
def _fresh(copy: Path) -> Iterator[None]:
    shutil.copytree(kernels_src(), copy)
    yield
    shutil.rmtree(copy)


@pytest.mark.parametrize(("world", "workload", "sms"), sorted({(bug.world, bug.workload, bug.sms) for bug in BUGS if not bug.tsan}))
def test_nothing_is_found_in_the_device_code_as_it_is(
    request: pytest.FixtureRequest, copy: Path, world: str, workload: str, sms: int
) -> None:
    with env.override(MKERNEL_KERNELS_SRC=copy, MKERNEL_CPU_SMS=sms):
        assert planted.check(world, workload, request.config.getoption("--seed")) is None


def _parameter(bug: Bug) -> ParameterSet:
    marks = [pytest.mark.slow] if bug.slow else [pytest.mark.xfail(strict=True, reason=bug.missed)] if bug.missed else []
    return pytest.param(bug, marks=marks, id=bug.name)


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS if not bug.tsan])
def test_found(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    reports = []
    with env.override(MKERNEL_KERNELS_SRC=copy, MKERNEL_CPU_SMS=bug.sms):
        # The same seeds in every run: the checks are what is tested here, and the same seed gives the same interleaving.
        for seed in range(bug.seeds):
            report = planted.check(bug.world, bug.workload, seed)
            if report is None:
                continue
            assert report.startswith(_REPORTS) or "\ndeadlock at " in report
            if bug.found_as in report:
                return
            reports.append(report)
    pytest.fail(f"{bug.found_as or 'nothing'} is not reported over {bug.seeds} seeds, but:\n" + "\n".join(reports))


def _tsan(copy: Path, world: str, workload: str, seed: int, calls: int) -> tuple[str | None, str]:
    """What is found, and what ThreadSanitizer reports: a process of its own, with its library preloaded."""
    preload = libtsan()
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "TSAN_OPTIONS": "exitcode=0 report_signal_unsafe=0 report_thread_leaks=0",
        "MKERNEL_KERNELS_SRC": str(copy),
        "MKERNEL_CPU_SMS": "3" if topology(world).num_nodes == 1 else "4",  # few: starting threads is slow under ThreadSanitizer
        "OPENBLAS_NUM_THREADS": "1",  # its threads synchronize in a way that ThreadSanitizer does not see
    }
    # Some versions of the library cannot place their shadow memory under strong address-space randomization.
    setarch = shutil.which("setarch")
    run = [sys.executable, planted.__file__, world, workload, str(seed), str(calls)]
    command = [*((setarch, platform.machine(), "-R") if setarch else ()), *run]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["found"], done.stderr


@pytest.mark.tsan
@pytest.mark.parametrize(
    ("world", "workload"),
    [
        ("1x2", "chunks"),
        ("1x2", "reduce short"),
        ("1x2", "two shot short"),
        ("1x2", "packets"),
        *(pytest.param(world, "chunks", marks=pytest.mark.slow) for world in ("2x2", "4x1")),
        pytest.param("1x2", "warps short", marks=pytest.mark.slow),
        *(
            pytest.param(world, workload, marks=pytest.mark.slow)
            for world in ("1x2", "2x2", "4x1")
            for workload in ("reduce", "reduce exactly", "one shot", "two shot")
        ),
        *(pytest.param("1x3", workload, marks=pytest.mark.slow) for workload in ("packets", "packets in one step", "packets short")),
    ],
)
def test_no_race_in_the_device_code_as_it_is(request: pytest.FixtureRequest, copy: Path, world: str, workload: str) -> None:
    # Few calls: each starts a thread of ThreadSanitizer's for every thread of the kernel.
    found, errors = _tsan(copy, world, workload, request.config.getoption("--seed"), 4)
    assert found is None
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


@pytest.mark.tsan
@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS if bug.tsan])
def test_found_by_thread_sanitizer(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    found, errors = _tsan(copy, bug.world, "chunks" if bug.workload == "tiles" else bug.workload, 0, 12)
    assert f"WARNING: ThreadSanitizer: {bug.found_as}" in errors or found is not None
