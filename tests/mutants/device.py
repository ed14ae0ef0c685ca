"""Every synchronization of the device code left out, one at a time: what ThreadSanitizer, or a result, notices of it.

``python tests/mutants/device.py [PATH ...] [--drawn N] [--seed S] [--jobs J]``

A site is a statement of ``kernels_src`` that does nothing but wait, meet or fence. In a copy of the device code it becomes empty, and the
ops that use its file run on target cpu: as they are over a few schedules, then under ThreadSanitizer. What is noticed by neither is listed:
the statement only brings lanes together again, or the checks are blind there, which a person has to find out. Before all that the device
code runs as it is, and nothing must be noticed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mkernel.jit.headers import kernels_src  # noqa: E402
from tests.ops.test_planted_bugs import BUGS  # noqa: E402
from tests.sanitizer import run_sanitized  # noqa: E402

_FOLDERS = ("comm", "tile", "gather", "reduce", "moe", "attention", "ops")
_CALLS = (
    "sync_warp|sync_cta|cluster_come|cluster_meet|fence_proxy_async(?:_shared)?|mbarrier_init_fence|barrier_sync|mbarrier_wait|wgmma_fence|"
    r"store_wait(?:_read)?<[^>]*>"
)
_SITE = re.compile(rf"^\s*(?:if constexpr \([^;]*?\) )?(?:ptx::(?:{_CALLS})\(.*\)|[\w.\[\]>-]+\.wait_(?:filled|taken)\(.*\));")
_SECONDS = 240

_GEMM = """
import sys
from tests.ops.planted import check
found = check(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
sys.exit(3 if found is not None else 0)
"""
_OP = """
import sys
from tests.shared.worlds import found_wrong
sys.exit(3 if found_wrong(sys.argv[2], sys.argv[1], "bfloat16", tuple(sys.argv[5:]), int(sys.argv[3])) is not None else 0)
"""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Calls of an op: of ``tests/ops/planted.py`` by name, or with sizes as its bench has them."""

    world: str
    name: str
    sizes: tuple[str, ...] = ()
    sms: int = 4
    network: bool = False  # that SMs play

    def command(self, seed: int, calls: int) -> list[str]:
        return [sys.executable, "-c", _OP if self.sizes else _GEMM, self.world, self.name, str(seed), str(calls), *self.sizes]


_ROUTED = ("37x136x520x4x2:hot", "21x136x520x4x2:uniform")
_DISPATCH = (Workload("1x2", "dispatch"), Workload("2x2", "dispatch", sms=5))
_COMBINE = (*(Workload(world, op, _ROUTED) for op in ("moe_combine", "moe_gemm_combine") for world in ("1x2", "2x2")),)
_RING = (
    Workload("1x2", "ring"),
    Workload("2x2", "ring", sms=6),
    Workload("1x2", "ring shared", sms=10),
    Workload("1x2", "ring by position"),
    Workload("2x2", "varlen", sms=6),
    Workload("2x2", "varlen by position", sms=6),
)
_FABRIC = (
    Workload("2x1", "moe_combine", ("37x136x520x4x2:hot",), network=True),
    Workload("2x1", "gemm_reduce_scatter", ("200x288x144",), network=True),
)
_TILES = (
    Workload("1x2", "tagged packets long"),
    Workload("1x2", "chunks"),
    Workload("1x2", "reduce short"),
    Workload("1x2", "pairs warps"),
    Workload("1x2", "gather packets short"),
    Workload("1x2", "two shot short"),
    Workload("1x2", "reduce pairs"),
)
_COMM = (Workload("1x2", "chunks"), Workload("1x2", "tagged packets short"), Workload("1x2", "reduce short"), Workload("2x2", "chunks"))
_BY_PREFIX = (
    ("tile/grouped", _DISPATCH),
    ("tile/masked", _DISPATCH),
    ("tile/", _TILES),
    ("comm/grid", _DISPATCH),
    ("comm/shard_packets", (Workload("1x2", "gather packets short"), Workload("1x3", "gather packets"))),
    ("comm/", _COMM),
    ("moe/combine", _COMBINE),
    ("ops/moe_combine", _COMBINE),
    ("ops/moe_gemm_combine", _COMBINE[2:]),
    ("moe/", (*_DISPATCH, *_COMBINE)),
    ("ops/moe_dispatch", _DISPATCH),
    ("attention/", _RING),
    ("ops/ring", _RING),
    ("ops/fabric", _FABRIC),
    *((prefix, (*_COMM, Workload("1x2", "gather packets short"))) for prefix in ("ops/allgather", "gather/")),
    ("ops/gemm_allreduce_one_shot", (Workload("1x2", "one shot"), Workload("2x2", "one shot"))),
    ("ops/gemm_allreduce", (Workload("1x2", "two shot short"), Workload("2x2", "two shot"))),
    ("ops/", (*_DISPATCH, *_COMM)),
)


@dataclasses.dataclass(frozen=True)
class Site:
    """A statement of the device code: its file, and its line, from 0."""

    path: str
    line: int
    text: str

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """Calls that reach its file; last those with which bugs are found there that somebody has thought of."""
        usual = next(workloads for prefix, workloads in _BY_PREFIX if self.path.startswith(prefix))
        planted = (Workload(bug.world, bug.workload, sms=bug.sms) for bug in BUGS if bug.file == self.path)
        return tuple(dict.fromkeys((*usual, *planted)))

    def leave_out(self, folder: Path) -> None:
        path = folder / self.path
        lines = path.read_text().split("\n")
        assert lines[self.line].strip() == self.text
        lines[self.line] = ""
        path.write_text("\n".join(lines))

    def __str__(self) -> str:
        return f"{self.path}:{self.line + 1}: {self.text}"


def sites(folder: Path) -> list[Site]:
    """All there are, file by file."""
    files = (path for name in _FOLDERS for path in sorted((folder / name).glob("*.cuh")))
    return [
        Site(str(path.relative_to(folder)), number, line.strip())
        for path in files
        for number, line in enumerate(path.read_text().split("\n"))
        if _SITE.match(line)
    ]


def noticed(folder: Path, workload: Workload, seed: int, *, sanitized: bool) -> bool:
    """Whether calls with the device code of ``folder`` fail, or race."""
    variables = {"MKERNEL_KERNELS_SRC": str(folder), "MKERNEL_CPU_SMS": str(workload.sms), "OPENBLAS_NUM_THREADS": "1"}
    command = workload.command(seed, 4 if sanitized else 1000)
    if workload.network:
        variables["MKERNEL_EMULATED_ENGINE"] = "sms"
    try:
        if sanitized:
            done = run_sanitized(command, variables, cwd=ROOT, timeout=_SECONDS)
        else:
            environment = os.environ | variables
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0 or "WARNING: ThreadSanitizer" in done.stderr


def by_what(folder: Path, site: Site) -> str:
    """What notices that the site is missing; "" if nothing does."""
    for sanitized, seeds in ((False, range(2)), (True, range(1))):
        for workload in site.workloads:
            for seed in seeds:
                if noticed(folder, workload, seed, sanitized=sanitized):
                    return f"{workload.name} on {workload.world}" + " under ThreadSanitizer" * sanitized
    return ""


@contextlib.contextmanager
def _place(places: queue.Queue[Path]) -> Iterator[Path]:
    place = places.get()
    shutil.copytree(kernels_src(), place)
    try:
        yield place
    finally:
        shutil.rmtree(place)
        places.put(place)


def noticed_as_it_is(found: Sequence[Site], places: queue.Queue[Path], pool: concurrent.futures.Executor) -> list[str]:
    """Which workloads of these sites fail, or race, with nothing left out: they would notice whatever one does."""

    def run(workload: Workload) -> str:
        with _place(places) as folder:
            noticing = [sanitized for sanitized in (False, True) if noticed(folder, workload, 0, sanitized=sanitized)]
        return f"{workload}: {noticing}" if noticing else ""

    return [text for text in pool.map(run, dict.fromkeys(workload for site in found for workload in site.workloads)) if text]


def judge(places: queue.Queue[Path], site: Site) -> str:
    """The same in a copy of the device code, at one of a few places: what has not changed is compiled once for each."""
    with _place(places) as folder:
        site.leave_out(folder)
        return by_what(folder, site)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="only sites whose file begins like one of these (default: all)")
    parser.add_argument("--drawn", type=int, default=None, help="so many of them (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once (%(default)s)")
    parser.add_argument("--list", action="store_true", help="show the sites, run nothing")
    options = parser.parse_args(arguments)
    found = [site for site in sites(kernels_src()) if not options.paths or site.path.startswith(tuple(options.paths))]
    if options.drawn is not None:
        found = random.Random(options.seed).sample(found, min(options.drawn, len(found)))
    if options.list:
        print("\n".join(map(str, found)))
        return 0
    missed = []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        places: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            places.put(Path(folder) / f"kernels_{number}")
        begin = time.monotonic()
        if as_it_is := noticed_as_it_is(found, places, pool):
            print("noticed with nothing left out:", *as_it_is, sep="\n  ")
            return 2
        print(f"{time.monotonic() - begin:6.0f} s  nothing is noticed as it is", flush=True)
        for site, what in zip(found, pool.map(lambda site: judge(places, site), found), strict=True):
            print(f"{time.monotonic() - begin:6.0f} s  {site}\n          {what or 'NOT NOTICED'}", flush=True)
            if not what:
                missed.append(site)
    print(f"{len(found)} left out, {len(missed)} of them not noticed", *missed, sep="\n  ")
    return len(missed) != 0


if __name__ == "__main__":
    sys.exit(main())
