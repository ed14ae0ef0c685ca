"""Which tests belong to which module: what must notice a mutation of it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PACKAGES", "files_of", "checks_of"]

PACKAGES = ("runtime", "ops", "bench", "jit", "transport")

# Modules that need GPUs, RDMA or other libraries: their tests are elsewhere (tests/gpu, tests/vm).
_ELSEWHERE = {
    "mkernel/runtime/cuda.py",
    "mkernel/runtime/gpu_arrays.py",
    "mkernel/jit/cuda.py",
    "mkernel/bench/libraries.py",
    "mkernel/bench/machine.py",
    "mkernel/transport/verbs.py",
}
_RUNTIME = (
    "tests/runtime/test_world.py",
    "tests/runtime/test_world_order.py",
    "tests/runtime/test_options.py",
    "tests/runtime/test_launch.py",
)
_ENDING = ("tests/runtime/test_endings.py", "tests/runtime/test_forks.py")
_LINKS = (
    "tests/runtime/test_control.py",
    "tests/runtime/test_bootstrap.py",
    "tests/runtime/test_addresses.py",
    "tests/runtime/test_strangers.py",
)
_OPS = ("tests/test_tiny.py", "tests/runtime/test_streams.py", "tests/ops/test_bad_input.py")
_TESTS: dict[str, tuple[str, ...]] = {
    "mkernel/bench": ("tests/bench",),
    "mkernel/jit": ("tests/jit", "tests/cpu_target/test_device.py"),
    "mkernel/ops": _OPS,
    "mkernel/ops/tuning.py": ("tests/ops/test_tuning.py", "tests/unit/test_pictures.py"),
    "mkernel/runtime": _RUNTIME,
    "mkernel/runtime/addresses.py": _LINKS,
    "mkernel/runtime/arrays.py": ("tests/runtime/test_streams.py", "tests/runtime/test_dlpack.py", "tests/ops/test_libraries.py"),
    "mkernel/runtime/barchart.py": ("tests/unit/test_pictures.py",),
    "mkernel/runtime/bins.py": ("tests/unit/test_pictures.py",),
    "mkernel/runtime/bootstrap.py": _LINKS,
    "mkernel/runtime/control.py": _LINKS,
    "mkernel/runtime/cpu.py": ("tests/cpu_target/test_device.py", "tests/cpu_target/test_cohort.py", *_RUNTIME),
    "mkernel/runtime/current.py": (*_RUNTIME, *_ENDING),
    "mkernel/runtime/dlpack.py": ("tests/runtime/test_dlpack.py", "tests/ops/test_bad_input.py"),
    "mkernel/runtime/ending.py": _ENDING,
    "mkernel/runtime/handshake.py": _LINKS,
    "mkernel/runtime/mpi.py": (*_ENDING, "tests/runtime/test_processes.py"),
    "mkernel/runtime/placement.py": ("tests/runtime/test_placement.py", "tests/runtime/test_world.py"),
    "mkernel/runtime/rendezvous.py": _LINKS,
    "mkernel/runtime/streams.py": ("tests/runtime/test_streams.py", "tests/runtime/test_threads.py"),
    "mkernel/runtime/svg.py": ("tests/unit/test_pictures.py",),
    "mkernel/runtime/timeline.py": ("tests/unit/test_pictures.py", "tests/unit/test_cli_trace.py"),
    "mkernel/runtime/trace.py": ("tests/unit/test_cli_trace.py", "tests/unit/test_pictures.py"),
    "mkernel/runtime/tuned.py": ("tests/runtime/test_tuned.py",),
    "mkernel/runtime/views.py": ("tests/runtime/test_dlpack.py", "tests/runtime/test_streams.py", "tests/ops/test_bad_input.py"),
    "mkernel/runtime/wire.py": _LINKS,
    "mkernel/runtime/workers": (
        "tests/runtime/test_workers.py",
        "tests/runtime/test_workers_ends.py",
        "tests/runtime/test_workers_output.py",
        "tests/runtime/test_workers_pickling.py",
    ),
    "mkernel/transport": ("tests/transport",),
}


def files_of(root: Path, package: str) -> list[str]:
    """The modules of a package whose tests run on any machine."""
    paths = (str(path.relative_to(root)) for path in (root / "mkernel" / package).rglob("*.py"))
    return sorted(path for path in paths if path not in _ELSEWHERE)


def checks_of(path: str) -> tuple[str, ...]:
    """Of the module itself, else of the nearest folder that has an entry."""
    parts = path.split("/")
    for end in range(len(parts), 1, -1):
        if found := _TESTS.get("/".join(parts[:end])):
            return found
    raise LookupError(path)
