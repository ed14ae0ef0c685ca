"""Baselines by torch with NCCL where torch is installed, else by CuPy with its NCCL wrapper, else none.

A baseline that fails is left out on all ranks, and the reason is recorded. A failure of mkernel is never hidden.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.peers import gather, worst_reason

if TYPE_CHECKING:
    from mkernel.bench.timing import Call

__all__ = ["CupyBaselines", "NoBaselines", "TorchBaselines", "open_baselines"]

Triple = tuple[Any, Any, Any]  # a, b, c

NCCL, ASYNC_TP = "NCCL+cuBLAS", "torch async-TP"
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"  # all-reduces on symmetric memory, after torch.matmul
_NCCL_BFLOAT16 = 9  # ncclBfloat16 of nccl.h, which CuPy's constants do not name in every version


class NoBaselines:
    """No baselines: target cpu has nothing to compare with."""

    def __init__(self, reason: str) -> None:
        self.missing: dict[str, str] = {"baselines": reason}

    def allgather_gemm(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        return {}

    gemm_reduce_scatter = gemm_allreduce = allgather_gemm

    def matmul(self, sets: Sequence[Triple]) -> Sequence[Call]:
        return []

    def close(self) -> None: ...


class TorchBaselines:
    """torch.distributed (NCCL), torch.matmul (cuBLAS), torch's symmetric-memory ops (async-TP)."""

    def __init__(self, world: Any, stream: Any) -> None:
        self._world, self.missing = world, dict[str, str]()
        self._torch = torch = importlib.import_module("torch")
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream.ptr, device=world.device))
        self._dist: Any = None
        if world.size > 1:
            address = _meeting_point(world)
            self.missing.update(self._try("NCCL", lambda: self._connect(address)))

    def _connect(self, address: str) -> None:
        dist = importlib.import_module("torch.distributed")
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://{address}",
            rank=self._world.rank,
            world_size=self._world.size,
            timeout=datetime.timedelta(seconds=60),  # shorter than the ranks wait for each other, so that a baseline that hangs is left out
            device_id=self._torch.device("cuda", self._world.device),
        )
        self._dist = dist

    def _try(self, name: str, work: Callable[[], None]) -> dict[str, str]:
        """Run a collective preparation. Returns {name: reason} if it failed on any rank, else {}."""
        reason = worst_reason(self._world, _failure(work))
        return {name: reason} if reason else {}

    def tensor(self, array: Any) -> Any:
        """A torch tensor of the same memory. It is made through int16, which every version of DLPack knows."""
        bits = self._torch.from_dlpack(array.view("int16"))
        return bits.view(self._torch.bfloat16 if str(array.dtype) == "bfloat16" else self._torch.float16)

    def matmul(self, sets: Sequence[Triple]) -> Sequence[Call]:
        tensors = [tuple(map(self.tensor, triple)) for triple in sets]
        return [functools.partial(self._torch.matmul, a, b, out=c) for a, b, c in tensors]

    def allgather_gemm(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        if self._dist is None:
            return {}
        sets = self._tensors(a, b, c)
        rows, k = sets[0][0].shape
        gathered = self._torch.empty((rows * self._world.size, k), dtype=sets[0][0].dtype, device=sets[0][0].device)

        def nccl(a: Any, b: Any, c: Any) -> None:
            self._dist.all_gather_into_tensor(gathered, a)
            self._torch.matmul(gathered, b, out=c)

        group = self._dist.group.WORLD.group_name

        def async_tp(a: Any, b: Any) -> Any:
            return self._torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group)[1][0]

        return self._with_async_tp([functools.partial(nccl, *triple) for triple in sets], async_tp, sets)

    def gemm_reduce_scatter(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        if self._dist is None:
            return {}
        sets = self._tensors(a, b, c)
        product = self._product(sets[0])

        def nccl(a: Any, b: Any, c: Any) -> None:
            self._torch.matmul(a, b, out=product)
            self._dist.reduce_scatter_tensor(c, product)

        group = self._dist.group.WORLD.group_name

        def async_tp(a: Any, b: Any) -> Any:
            return self._torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, group)

        return self._with_async_tp([functools.partial(nccl, *triple) for triple in sets], async_tp, sets)

    def gemm_allreduce(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        if self._dist is None:
            return {}

        def nccl(a: Any, b: Any, c: Any) -> None:
            self._torch.matmul(a, b, out=c)
            self._dist.all_reduce(c)

        sets = self._tensors(a, b, c)
        calls: dict[str, Sequence[Call]] = {NCCL: [functools.partial(nccl, *triple) for triple in sets]}
        return calls | self._symmetric(calls[NCCL][0], sets)

    def _symmetric(self, reference: Call, sets: Sequence[Triple]) -> dict[str, Sequence[Call]]:
        """The product into symmetric memory, then torch's all-reduce of that: in one step into c, or in two where it lies."""
        names = [name for name in (ONE_SHOT, TWO_SHOT) if name not in self.missing]
        made: list[Any] = []
        group = self._dist.group.WORLD.group_name

        def make() -> None:
            memory = importlib.import_module("torch.distributed._symmetric_memory")
            memory.enable_symm_mem_for_group(group)
            c = sets[0][2]
            made.append(memory.empty(c.shape, dtype=c.dtype, device=c.device))
            memory.rendezvous(made[0], group)

        if names and (failed := self._try("", make)):
            self.missing.update(dict.fromkeys(names, failed[""]))
            return {}

        def one_shot(a: Any, b: Any, c: Any) -> Any:
            self._torch.matmul(a, b, out=made[0])
            return self._torch.ops.symm_mem.one_shot_all_reduce_out(made[0], "sum", group, c)

        def two_shot(a: Any, b: Any, c: Any) -> Any:
            self._torch.matmul(a, b, out=made[0])
            return self._torch.ops.symm_mem.two_shot_all_reduce_(made[0], "sum", group)

        found: dict[str, Sequence[Call]] = {}
        for name, call in ((ONE_SHOT, one_shot), (TWO_SHOT, two_shot)):
            calls = [functools.partial(call, *triple) for triple in sets]
            if name in names:
                self.missing.update(self._try(name, functools.partial(self._compare, reference, calls[0], sets[0][2])))
                found |= {} if name in self.missing else {name: calls}
        return found

    def _tensors(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> list[Triple]:
        return [(self.tensor(x), self.tensor(y), self.tensor(z)) for x, y, z in zip(a, b, c, strict=True)]

    def _product(self, operands: Triple) -> Any:
        """An array for the local product."""
        a, b, _ = operands
        return self._torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)

    def _with_async_tp(
        self, nccl: Sequence[Call], async_tp: Callable[[Any, Any], Any], sets: Sequence[Triple]
    ) -> dict[str, Sequence[Call]]:
        found = {NCCL: nccl}
        if ASYNC_TP not in self.missing:
            calls = [functools.partial(async_tp, a, b) for a, b, _ in sets]
            self.missing.update(self._try(ASYNC_TP, functools.partial(self._first_async_tp, nccl[0], calls[0], sets[0][2])))
            if ASYNC_TP not in self.missing:
                found[ASYNC_TP] = calls
        return found

    def _first_async_tp(self, reference: Call, call: Call, c: Any) -> None:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        memory.enable_symm_mem_for_group(self._dist.group.WORLD.group_name)
        self._compare(reference, call, c)

    def _compare(self, reference: Call, call: Call, c: Any) -> None:
        """Make each call once and compare what they return, or NCCL leaves in ``c``: nothing else checks these results."""
        reference()
        expected = c.float()  # a copy
        result = call()
        self._torch.cuda.synchronize()
        norm = self._torch.linalg.vector_norm
        error = float(norm(result.float() - expected) / norm(expected))
        if not error < 0.01:
            raise RuntimeError(f"its result is off by {error:.3g} of the norm")

    def close(self) -> None:
        if self._dist is not None:
            self._torch.cuda.synchronize()
            self._dist.destroy_process_group()
            self._dist = None


class CupyBaselines:
    """cupy.matmul (cuBLAS) and NCCL through CuPy, where torch is not installed."""

    def __init__(self, world: Any, stream: Any, why: str) -> None:
        self._world, self._stream, self._xp = world, stream, world.xp
        self.missing: dict[str, str] = {ASYNC_TP: why}
        self._nccl: Any = None
        self._communicator: Any = None
        if world.size > 1:
            reason = worst_reason(world, _failure(self._load)) or worst_reason(world, _failure(self._connect))
            if reason:
                self.missing["NCCL"] = reason

    def _load(self) -> None:
        self._nccl = importlib.import_module("cupy.cuda.nccl")
        if not self._nccl.available:
            raise RuntimeError("CuPy does not find NCCL")

    def _connect(self) -> None:
        identity = gather(self._world, list(self._nccl.get_unique_id()) if self._world.rank == 0 else None)[0]
        self._communicator = self._nccl.NcclCommunicator(self._world.size, tuple(identity), self._world.rank)

    def matmul(self, sets: Sequence[Triple]) -> Sequence[Call]:
        return [functools.partial(self._xp.matmul, a, b, out=c) for a, b, c in sets]

    def allgather_gemm(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        if self._communicator is None:
            return {}
        gathered = self._xp.empty((a[0].shape[0] * self._world.size, a[0].shape[1]), dtype=a[0].dtype)

        def nccl(a: Any, b: Any, c: Any) -> None:
            # As bytes: gathering needs no arithmetic, and not every version of CuPy names bfloat16.
            self._communicator.allGather(a.data.ptr, gathered.data.ptr, a.nbytes, self._nccl.NCCL_INT8, self._stream.ptr)
            self._xp.matmul(gathered, b, out=c)

        return {NCCL: [functools.partial(nccl, *triple) for triple in zip(a, b, c, strict=True)]}

    def gemm_reduce_scatter(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        if self._communicator is None:
            return {}
        product, kind = self._xp.empty((a[0].shape[0], b[0].shape[1]), dtype=a[0].dtype), self._type(a[0])

        def nccl(a: Any, b: Any, c: Any) -> None:
            self._xp.matmul(a, b, out=product)
            self._communicator.reduceScatter(product.data.ptr, c.data.ptr, c.size, kind, self._nccl.NCCL_SUM, self._stream.ptr)

        return {NCCL: [functools.partial(nccl, *triple) for triple in zip(a, b, c, strict=True)]}

    def gemm_allreduce(self, a: Sequence[Any], b: Sequence[Any], c: Sequence[Any]) -> dict[str, Sequence[Call]]:
        if self._communicator is None:
            return {}
        kind = self._type(a[0])

        def nccl(a: Any, b: Any, c: Any) -> None:
            self._xp.matmul(a, b, out=c)
            self._communicator.allReduce(c.data.ptr, c.data.ptr, c.size, kind, self._nccl.NCCL_SUM, self._stream.ptr)

        return {NCCL: [functools.partial(nccl, *triple) for triple in zip(a, b, c, strict=True)]}

    def _type(self, array: Any) -> int:
        return _NCCL_BFLOAT16 if str(array.dtype) == "bfloat16" else int(self._nccl.NCCL_FLOAT16)

    def close(self) -> None:
        if self._communicator is not None:
            self._stream.synchronize()
            self._communicator.destroy()
            self._communicator = None


Baselines = NoBaselines | TorchBaselines | CupyBaselines


def open_baselines(world: Any, stream: Any) -> Baselines:
    """Baselines by the best library that every rank has. Collective."""
    # No contestant may use NVLink multicast. The libraries read these when they are loaded or first used.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    without_torch = worst_reason(world, _failure(lambda: importlib.import_module("torch").cuda.set_device(world.device)))
    if not without_torch:
        return TorchBaselines(world, stream)
    return CupyBaselines(world, stream, without_torch)


def _failure(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


def _meeting_point(world: Any) -> str:
    """A ``host:port`` on rank 0's machine that is free now."""
    mine = ""
    if world.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            host = "127.0.0.1" if len(set(gather(world, socket.gethostname()))) == 1 else socket.gethostname()
            mine = f"{host}:{probe.getsockname()[1]}"
    else:
        gather(world, socket.gethostname())
    return str(gather(world, mine)[0])
