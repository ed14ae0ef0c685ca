"""Linear layers whose weight is spread over the ranks: drop-in replacements for ``torch.nn.Linear``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mkernel.errors import ArgumentError
from mkernel.runtime import current
from mkernel.torch.gemm import allgather_gemm, gemm_allreduce, gemm_reduce_scatter, replicated_gemm, shared
from mkernel.torch.library import autocast_dtype, named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mkernel.runtime.world import World

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(nn.Linear):
    """What both layers share. Parameters: those of ``nn.Linear``; a rank holds its shard of each, as a DTensor where a mesh is given.

    Of float32 they may be where something else makes them bfloat16 or float16 to multiply: torch.autocast, or FSDP2's mixed precision.

    Class attributes
    ----------------
    _split
        Dimension of ``weight`` that is spread over the ranks.
    _bias_placement
        How ``bias`` lies on the mesh.
    """

    _split: int
    _bias_placement: Any

    world: str
    ranks: int
    sequence_parallel: bool
    batch_first: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        world: World | str | None = None,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = torch.bfloat16,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._shard(world, mesh, sequence_parallel, batch_first)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        world: World | str | None = None,
        mesh: DeviceMesh | None = None,
        sequence_parallel: bool = True,
        batch_first: bool = False,
    ) -> Self:
        """Make a layer of this kind out of ``linear``, in place: all ranks have the same whole parameters, and keep their shards.

        Parameters that are DTensors on ``mesh`` already keep their shards where these are the right ones.
        """
        linear.__class__ = cls
        made: Self = linear
        made._shard(world, mesh, sequence_parallel, batch_first)
        return made

    def _shard(self, world: World | str | None, mesh: DeviceMesh | None, sequence_parallel: bool, batch_first: bool) -> None:
        w = _world_of(world, mesh)
        _check(w, mesh, self)
        self.world, self.ranks = w.name, w.size
        self.sequence_parallel, self.batch_first = sequence_parallel, batch_first
        extent = self.weight.shape[self._split]
        if extent % (8 * w.size):
            name = ("out_features", "in_features")[self._split]
            raise ArgumentError(name, extent, f"must be a multiple of 8 x {w.size} ranks", "pad the layer")
        for name, placement in self._placements().items():
            whole = getattr(self, name)
            if whole is not None:
                setattr(self, name, _parameter(whole, placement, w.rank, w.size, mesh))

    def reset_parameters(self) -> None:
        """Draw the whole layer as ``nn.Linear`` does, and keep this rank's part of it; DTensors are drawn by torch."""
        if not hasattr(self, "world") or isinstance(self.weight, DTensor):  # before it is spread over the ranks, or as torch has it
            super().reset_parameters()
            return
        whole = nn.Linear(self.in_features, self.out_features, self.bias is not None, device=self.weight.device, dtype=self.weight.dtype)
        rank = named(self.world).rank
        with torch.no_grad():
            for name, placement in self._placements().items():
                parameter = getattr(self, name)
                if parameter is not None:
                    parameter.copy_(_part(getattr(whole, name), placement, rank, self.ranks))

    def _placements(self) -> dict[str, Any]:
        """How each parameter lies on the ranks."""
        return {"weight": Shard(self._split), "bias": self._bias_placement}

    def _local(self) -> tuple[Tensor, Tensor | None]:
        """The weight of this rank, and its bias."""
        weight, bias = _to_local(self.weight), self.bias
        if weight.dtype == torch.float32 and autocast_dtype(weight.device.type) is None:
            remedy = "run it under torch.autocast or fully_shard(mp_policy=...), or convert it: .to(torch.bfloat16)"
            raise ArgumentError("weight.dtype", weight.dtype, "must be bfloat16 or float16 where the layer multiplies", remedy)
        return weight, None if bias is None else _to_local(bias)

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` as a matrix whose rows are in the order of the sequence."""
        if self.batch_first and x.dim() > 2 and x.shape[0] != 1:
            rule = "with batch_first the ranks' rows are contiguous only where there is one batch"
            raise ArgumentError("x.shape", tuple(x.shape), rule, "pass (S/W, B, H), as Megatron's layers take it")
        return x.reshape(-1, x.shape[-1]).contiguous()

    def _shaped(self, y: Tensor, x: Tensor, ranks: int) -> Tensor:
        """``y`` with the dimensions of ``x``; the sequence is ``ranks`` times as long, or 1/-ranks."""
        shape: list[int] = list(x.shape)
        at = 1 if self.batch_first and x.dim() > 2 else 0
        shape[at] = shape[at] * ranks if ranks > 0 else shape[at] // -ranks
        return y.view(*shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        order = ", batch_first" if self.batch_first else ""
        return f"{super().extra_repr()}, world={self.world}, sequence_parallel={self.sequence_parallel}{order}"


class ColumnParallelLinear(_ParallelLinear):
    """``y = x @ weight^T + bias`` where each rank has some of the outputs: the first layer of a pair.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As of ``nn.Linear``, of the whole layer. ``out_features`` is a multiple of 8 W. Parameters are drawn like those of ``nn.Linear``:
        after the same ``torch.manual_seed`` the whole layer is the same for any number of ranks.
    world
        A world, its name, or None: the one that was made of the mesh's process group, else the current one.
    mesh
        One-dimensional DeviceMesh of the world's ranks, in their order. Parameters are then DTensors: ``weight`` (out, in) sharded by
        dimension 0, ``bias`` (out) likewise. None: they are plain tensors, this rank's shards.
    sequence_parallel
        True: x is (S/W, B, in), this rank's part of the sequence, and y (S, B, out/W), by one ``mk.allgather_gemm``. False: x is
        (S, B, in), the same on all ranks; only the backward pass communicates, by one ``mk.gemm_allreduce``.
    batch_first
        x is (1, S/W, in): with more batches a rank's rows would not follow each other.

    Raises
    ------
    ArgumentError
        A size does not fit the ranks, the mesh is not the world's, or x is (B, S/W, in) with B > 1.

    Examples
    --------
    >>> import torch, mkernel as mk, mkernel.torch as mkt
    >>> def rank(world):
    ...     up, down = mkt.ColumnParallelLinear(64, 128), mkt.RowParallelLinear(128, 64)
    ...     x = torch.ones(4, 2, 64, dtype=torch.bfloat16)  # (S/W, B, H)
    ...     h = up(x)
    ...     return tuple(up.weight.shape), tuple(h.shape), tuple(down(h).shape)
    >>> mk.launch(rank, ranks=2, target="cpu")[0]
    ((64, 64), (8, 2, 64), (4, 2, 64))
    """

    _split = 0
    _bias_placement = Shard(0)

    def forward(self, input: Tensor) -> Tensor:
        (weight, bias), rows = self._local(), self._rows(input)
        if self.sequence_parallel:
            y = allgather_gemm(rows, weight.t(), world=self.world)
        else:
            y = replicated_gemm(rows, weight.t(), world=self.world)
        if bias is not None:
            y = y + bias.to(y.dtype)
        return self._shaped(y, input, self.ranks if self.sequence_parallel else 1)


class RowParallelLinear(_ParallelLinear):
    """``y = x @ weight^T + bias`` where each rank has some of the inputs: the second layer of a pair.

    Parameters as of ``ColumnParallelLinear``, but ``in_features`` is a multiple of 8 W, ``weight`` is sharded by dimension 1, and ``bias``
    is the same on all ranks. x is (S, B, in/W). With ``sequence_parallel`` y is (S/W, B, out), this rank's part of the sequence, by one
    ``mk.gemm_reduce_scatter``, and the gradient of ``bias`` is summed over the ranks; without it y is (S, B, out), the same on all ranks,
    by one ``mk.gemm_allreduce``.
    """

    _split = 1
    _bias_placement = Replicate()

    def forward(self, input: Tensor) -> Tensor:
        (weight, bias), rows = self._local(), self._rows(input)
        if self.sequence_parallel:
            y = gemm_reduce_scatter(rows, weight.t(), world=self.world)
        else:
            y = gemm_allreduce(rows, weight.t(), world=self.world)
        if bias is not None:
            y = y + (shared(bias, world=self.world) if self.sequence_parallel else bias).to(y.dtype)
        return self._shaped(y, input, -self.ranks if self.sequence_parallel else 1)


def _to_local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _part(whole: Tensor, placement: Any, rank: int, ranks: int) -> Tensor:
    """What this rank has of it, in memory of its own unless that is all."""
    if not isinstance(placement, Shard):
        return whole
    return whole.chunk(ranks, placement.dim)[rank].clone(memory_format=torch.contiguous_format)


def _parameter(whole: Tensor, placement: Any, rank: int, ranks: int, mesh: DeviceMesh | None) -> nn.Parameter:
    """The shard of this rank, as a parameter."""
    if isinstance(whole, DTensor):
        if whole.device_mesh != mesh or tuple(whole.placements) != (placement,):
            raise ArgumentError("weight", whole.placements, f"is a DTensor already, and must be {placement} on the mesh", "shard it once")
        return nn.Parameter(whole, requires_grad=whole.requires_grad)
    local = _part(whole.detach(), placement, rank, ranks)
    if mesh is not None:
        local = DTensor.from_local(local, mesh, [placement], run_check=False)
    return nn.Parameter(local, requires_grad=whole.requires_grad)


def _world_of(world: World | str | None, mesh: DeviceMesh | None) -> World:
    """The world that is meant; None: the one that was made of the mesh's process group, else the current one."""
    if isinstance(world, str):
        return named(world)
    if world is None and mesh is not None and mesh.ndim == 1:
        world = current.of_group(str(mesh.get_group().group_name))
    return current.current(world)


def _check(world: World, mesh: DeviceMesh | None, layer: nn.Linear) -> None:
    if layer.weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        rule = "must be bfloat16, float16, or float32 under torch.autocast"
        raise ArgumentError("dtype", layer.weight.dtype, rule, "convert the layer first: .to(torch.bfloat16)")
    if layer.in_features % 8 or layer.out_features % 8:
        raise ArgumentError("in_features, out_features", (layer.in_features, layer.out_features), "must be multiples of 8", "pad the layer")
    if mesh is None:
        return
    shape: Sequence[int] = tuple(mesh.shape)
    if tuple(shape) != (world.size,) or mesh.get_local_rank() != world.rank:
        rule = f"must be one-dimensional, of the {world.size} ranks of {world.name} in their order"
        raise ArgumentError("mesh", shape, rule, 'make the world of it: mk.init(mesh["tp"].get_group())')
