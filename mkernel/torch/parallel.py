"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``: torch's names, mkernel's kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from mkernel.errors import ArgumentError
from mkernel.torch.linear import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from mkernel.runtime.world import World

__all__ = ["ColwiseParallel", "RowwiseParallel"]

_LAST = Shard(-1)


class _Style(ParallelStyle):
    """What both styles share: their layouts, and the exchange of a linear layer's class."""

    def __init__(self, *, input_layouts: Any, output_layouts: Any, use_local_output: bool, world: World | str | None) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts, output_layouts
        self.use_local_output, self._world = use_local_output, world

    def _convert(self, kind: Any, module: nn.Module, mesh: DeviceMesh, sequence: Any, output: Any) -> nn.Module:
        """``sequence``: layout of what is spread by the sequence, or Replicate; ``output``: layout of the result."""
        if not isinstance(module, nn.Linear):
            raise ArgumentError("module", type(module).__name__, "must be a torch.nn.Linear", "parallelize its linear layers by name")
        if isinstance(sequence, Shard) and sequence.dim not in (0, 1):
            raise ArgumentError("layout", sequence, "must be Replicate(), Shard(0) for (S/W, B, H), or Shard(1) for (1, S/W, H)")
        parallel, batch_first = isinstance(sequence, Shard), isinstance(sequence, Shard) and sequence.dim == 1
        made = kind.from_linear(module, world=self._world, mesh=mesh, sequence_parallel=parallel, batch_first=batch_first)
        expected = self.input_layouts

        def to_local(layer: nn.Module, inputs: Any) -> Any:
            x = inputs[0]
            if not isinstance(x, DTensor):
                return inputs
            if tuple(x.placements) != (expected,):
                x = x.redistribute(mesh, [expected])
            return (x.to_local(), *inputs[1:])

        made.register_forward_pre_hook(to_local)
        if not self.use_local_output:
            made.register_forward_hook(lambda layer, inputs, y: DTensor.from_local(y, mesh, [output], run_check=False))
        return made


class ColwiseParallel(_Style):
    """As torch's ColwiseParallel: the linear layer becomes a ``ColumnParallelLinear`` on the mesh.

    Parameters
    ----------
    input_layouts
        ``Shard(0)``: x is (S/W, B, H), gathered and multiplied in one kernel, where torch's style would gather first; ``Shard(1)``: x is
        (1, S/W, H); ``Replicate()``, the default: x is the same on all ranks.
    output_layouts
        ``Shard(-1)`` only.
    use_local_output
        Whether the result is a plain tensor, or a DTensor.
    world
        Of the mesh's ranks; None: the one that ``mk.init(mesh.get_group())`` made, else the current one.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        world: World | str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts or Replicate(),
            output_layouts=output_layouts or _LAST,
            use_local_output=use_local_output,
            world=world,
        )
        if self.output_layouts != _LAST:
            raise ArgumentError("output_layouts", self.output_layouts, "must be Shard(-1)", "redistribute what the layer returns")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._convert(ColumnParallelLinear, module, device_mesh, self.input_layouts, self.output_layouts)


class RowwiseParallel(_Style):
    """As torch's RowwiseParallel: the linear layer becomes a ``RowParallelLinear`` on the mesh.

    Parameters
    ----------
    input_layouts
        ``Shard(-1)`` only.
    output_layouts
        ``Shard(0)``: y is (S/W, B, H), multiplied, summed and scattered in one kernel; ``Shard(1)``: y is (1, S/W, H); ``Replicate()``, the
        default: y is the sum on all ranks.
    use_local_output, world
        As of ``ColwiseParallel``.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
        world: World | str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts or _LAST,
            output_layouts=output_layouts or Replicate(),
            use_local_output=use_local_output,
            world=world,
        )
        if self.input_layouts != _LAST:
            raise ArgumentError("input_layouts", self.input_layouts, "must be Shard(-1)", "let the layer before be column-parallel")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._convert(RowParallelLinear, module, device_mesh, self.output_layouts, self.output_layouts)
