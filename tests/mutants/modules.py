"""Which tests belong to which module: what must notice a mutation of it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PACKAGES", "files_of", "checks_of"]

PACKAGES = ("runtime", "ops", "planner", "bench", "jit", "transport")

# Modules that need GPUs, RDMA or other libraries: their tests are elsewhere (tests/gpu, tests/vm).
_ELSEWHERE = {
    "mkernel/runtime/cuda/copier.py",
    "mkernel/runtime/cuda/backend.py",
    "mkernel/runtime/cuda/gpus.py",
    "mkernel/runtime/cuda/kernel.py",
    "mkernel/runtime/cuda/libraries.py",
    "mkernel/jit/cuda.py",
    "mkernel/bench/baselines.py",
    "mkernel/bench/machine.py",
    "mkernel/transport/verbs/pyverbs.py",
}
_RUNTIME = (
    "tests/runtime/test_world.py",
    "tests/runtime/test_world_calls.py",
    "tests/runtime/test_world_failures.py",
    "tests/runtime/test_call_errors.py",
    "tests/ops/test_moe_refused.py",
    "tests/runtime/test_world_order.py",
    "tests/runtime/test_options.py",
    "tests/runtime/test_launch.py",
)
_CPU = ("tests/cpu_target/test_device.py", "tests/cpu_target/test_thread_ranks.py", *_RUNTIME)
_ENDING = ("tests/runtime/test_endings.py", "tests/runtime/test_forks.py")
_LINKS = (
    "tests/runtime/test_control.py",
    "tests/runtime/test_bootstrap.py",
    "tests/runtime/test_addresses.py",
    "tests/runtime/test_strangers.py",
)
_OPS = ("tests/test_tiny.py", "tests/runtime/test_streams.py", "tests/ops/test_bad_input.py")
_SIZES = ("tests/unit/test_entry_check.py", "tests/ops/test_sizes.py")
_TESTS: dict[str, tuple[str, ...]] = {
    "mkernel/bench": ("tests/bench",),
    "mkernel/jit": ("tests/jit", "tests/cpu_target/test_device.py"),
    "mkernel/jit/spec.py": ("tests/jit", "tests/ops/test_pairs.py"),
    "mkernel/ops": _OPS,
    "mkernel/ops/call.py": (
        *(*_OPS, *_SIZES),
        *("tests/ops/test_tuning.py", "tests/ops/test_remember.py", "tests/ops/test_forms.py", "tests/runtime/test_array_libraries.py"),
    ),
    "mkernel/ops/gemm.py": (*_OPS, "tests/ops/test_libraries.py", "tests/ops/test_forms.py"),
    "mkernel/ops/prepared_plan.py": (*_OPS, *_SIZES),
    "mkernel/ops/prepared_layer.py": ("tests/ops/test_moe_layer.py",),
    "mkernel/ops/schedule.py": (
        *(*_OPS, *_SIZES),
        *("tests/ops/test_sizes_split.py", "tests/ops/test_tuning.py", "tests/ops/test_remember.py"),
    ),
    "mkernel/ops/split_search.py": ("tests/ops/test_tuning.py", "tests/unit/test_pictures.py"),
    "mkernel/planner": ("tests/planner",),
    "mkernel/planner/pairs.py": ("tests/ops/test_pairs.py", "tests/planner"),
    "mkernel/tools": ("tests/unit/test_check.py", "tests/unit/test_cli.py", "tests/bench/test_command.py"),
    "mkernel/runtime": _RUNTIME,
    "mkernel/runtime/ranks/addresses.py": (*_LINKS, "tests/runtime/test_threads.py"),
    "mkernel/runtime/arrays/libraries.py": ("tests/runtime/test_streams.py", "tests/runtime/test_dlpack.py", "tests/ops/test_libraries.py"),
    "mkernel/runtime/pictures/barchart.py": ("tests/unit/test_pictures.py",),
    "mkernel/runtime/pictures/bins.py": ("tests/unit/test_pictures.py",),
    "mkernel/runtime/failure_watch.py": (*_RUNTIME, "tests/runtime/test_network.py"),
    "mkernel/runtime/options.py": (*_RUNTIME, "tests/jit/test_env.py"),
    "mkernel/runtime/init.py": (*_RUNTIME, "tests/runtime/test_placement.py"),
    "mkernel/runtime/opening/target.py": (*_RUNTIME, "tests/runtime/test_placement.py"),
    "mkernel/runtime/world.py": (*_RUNTIME, "tests/ops/test_forms.py"),
    "mkernel/runtime/ranks/bootstrap.py": _LINKS,
    "mkernel/runtime/ranks/choice.py": _LINKS,
    "mkernel/runtime/ranks/control.py": _LINKS,
    "mkernel/runtime/cpu/engines.py": _CPU,
    "mkernel/runtime/cpu/thread_ranks.py": _CPU,
    "mkernel/runtime/cpu/backend.py": _CPU,
    "mkernel/runtime/cpu/copier.py": _CPU,
    "mkernel/runtime/cpu/memory.py": _CPU,
    "mkernel/runtime/cpu/rank_states.py": _CPU,
    "mkernel/runtime/cpu/scheduler.py": _CPU,
    "mkernel/runtime/current.py": (*_RUNTIME, *_ENDING),
    "mkernel/runtime/arrays/dlpack.py": ("tests/runtime/test_dlpack.py", "tests/ops/test_bad_input.py"),
    "mkernel/runtime/ending.py": _ENDING,
    "mkernel/runtime/ranks/handshake.py": _LINKS,
    "mkernel/runtime/ranks/mpi.py": (*_ENDING, "tests/runtime/test_processes.py"),
    "mkernel/runtime/opening/placement.py": ("tests/runtime/test_placement.py", "tests/runtime/test_network.py"),
    "mkernel/runtime/prepared.py": (*_RUNTIME, *_SIZES),
    "mkernel/runtime/ranks/rendezvous.py": _LINKS,
    "mkernel/runtime/cuda/events.py": ("tests/runtime/test_streams.py", "tests/runtime/test_threads.py"),
    "mkernel/runtime/cuda/queries.py": ("tests/runtime/test_streams.py", "tests/runtime/test_threads.py"),
    "mkernel/runtime/cuda/streams.py": ("tests/runtime/test_streams.py", "tests/runtime/test_threads.py"),
    "mkernel/runtime/pictures/svg.py": ("tests/unit/test_pictures.py",),
    "mkernel/runtime/cuda/tensor_map.py": ("tests/runtime/test_tensor_map.py",),
    "mkernel/runtime/pictures/timeline.py": ("tests/unit/test_pictures.py", "tests/unit/test_cli_trace.py"),
    "mkernel/runtime/trace.py": ("tests/unit/test_cli_trace.py", "tests/unit/test_pictures.py"),
    "mkernel/runtime/tuning_cache.py": ("tests/runtime/test_tuned.py",),
    "mkernel/runtime/arrays/views.py": ("tests/runtime/test_dlpack.py", "tests/runtime/test_streams.py", "tests/ops/test_bad_input.py"),
    "mkernel/runtime/ranks/socket_control.py": _LINKS,
    "mkernel/runtime/workers": (
        "tests/runtime/test_workers.py",
        "tests/runtime/test_workers_caller.py",
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
    """The tests of the module itself, else of the nearest folder that has an entry."""
    parts = path.split("/")
    for end in range(len(parts), 1, -1):
        if found := _TESTS.get("/".join(parts[:end])):
            return found
    raise LookupError(path)
