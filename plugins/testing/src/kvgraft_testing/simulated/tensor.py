"""Tensors whose bytes only the device can see.

Torch's operators on them are kernels: they are queued on the current stream, as on a GPU. Views
are taken at once. Reading values, as `.cpu()` and `.item()` do, is a copy that the host waits for;
`.numpy()` and memory addresses are refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft_testing.simulated.device import SimulatedDevice
    from kvgraft_testing.simulated.streams import Work

__all__ = ["DeviceTensor"]

aten = torch.ops.aten

INDEXED = {
    aten.index.Tensor: aten.index.Tensor,
    aten.index_put_.default: lambda at, dim, *_: aten.index.Tensor(at, dim),
    aten.index_select.default: lambda at, dim, index, *_: at.index_select(dim, index),
    aten.index_copy_.default: lambda at, dim, index, *_: at.index_select(dim, index),
}
"""Operators that touch a part of their first argument, and which part: of the positions `at`."""


class DeviceTensor(torch.Tensor):
    """A tensor of a simulated device.

    Args:
        inner: the same view of the device's memory; for the device alone.
        owner: the device.
    """

    on_device: torch.Tensor
    owner: SimulatedDevice

    @staticmethod
    def __new__(cls, inner: torch.Tensor, owner: SimulatedDevice) -> DeviceTensor:
        """A tensor without bytes of its own."""
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("meta"),
        )
        made.on_device, made.owner = inner, owner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Its owner's device."""
        return self.owner.device

    def data_ptr(self) -> int:
        """Refused: the host cannot use an address of the device."""
        raise RuntimeError("the host asked for an address of a simulated device's memory")

    def __setitem__(self, index: Any, value: Any) -> None:
        """A number is the host's; torch would make it a tensor of this device."""
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=self.dtype)
        super().__setitem__(index, value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({list(self.shape)}, {self.dtype}, {self.owner.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Take a view, copy to the host, or queue a kernel."""
        del types
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        owner = next(each.owner for each in flat if isinstance(each, DeviceTensor))
        returned = func._schema.returns
        alias = returned[0].alias_info if returned else None
        if alias is not None and not alias.is_write:
            return tree_map(lambda each: _wrapped(each, owner), func(*_inner(args), **kwargs))
        if func is aten._local_scalar_dense.default:
            return owner.fetch(args[0]).item()
        if func is aten._to_copy.default and torch.device(kwargs["device"]).type == "cpu":
            return owner.fetch(args[0]).to(kwargs.get("dtype"))
        if func is aten.copy_.default:
            return owner.copy_tensor(args[0], args[1], blocks=not (args[2:] and args[2]))
        return _queued(owner, func, args, kwargs)


def _inner(value: Any) -> Any:
    return tree_map(lambda each: each.on_device if isinstance(each, DeviceTensor) else each, value)


def _wrapped(value: Any, owner: SimulatedDevice) -> Any:
    return DeviceTensor(value, owner) if isinstance(value, torch.Tensor) else value


def _queued(owner: SimulatedDevice, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Queue an operator on the current stream; its results have their shapes at once."""
    indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
    for each in tree_flatten((args, kwargs))[0]:
        is_host = isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor)
        if is_host and each.dim() and not any(each is index for index in indices):
            raise RuntimeError(
                f"{func} gets tensors of a simulated device and of the CPU; copy them first"
            )
    # Indices and numbers of the host are read now.
    args, kwargs = tree_map(
        lambda each: each.clone() if type(each) is torch.Tensor else each, (args, kwargs)
    )
    if func._schema.returns and func._schema.returns[0].alias_info is not None:
        owner.kernel(str(func), lambda work: _run(owner, work, func, args, kwargs))
        return args[0]
    shapes = func(
        *tree_map(_on_meta, _inner(args)),
        **{
            key: each for key, each in _inner(kwargs).items() if key not in ("device", "pin_memory")
        },
    )
    results = tree_map(
        lambda each: (
            owner.zeros(each.shape, each.dtype, f"a result of {func}")
            if isinstance(each, torch.Tensor)
            else each
        ),
        shapes,
    )

    def run(work: Work) -> None:
        made = _run(owner, work, func, args, kwargs)
        for into, value in zip(tree_flatten(results)[0], tree_flatten(made)[0]):
            if isinstance(into, DeviceTensor):
                into.on_device.copy_(value)
                owner.note(work, into.on_device, writes=True)

    owner.kernel(str(func), run)
    return results


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _run(owner: SimulatedDevice, work: Work, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Run an operator on the device's bytes."""
    written = [
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    ]
    rest = _inner(args[1:])
    indexed = INDEXED.get(func)
    for index, argument in enumerate(args):
        part = None
        if index == 0 and indexed is not None:
            part = partial(_indexed, indexed, rest)
        for tensor in tree_flatten(argument)[0]:
            if isinstance(tensor, DeviceTensor):
                writes = index < len(written) and written[index]
                owner.note(work, tensor.on_device, writes=writes, part=part)
    kwargs = {key: each for key, each in kwargs.items() if key not in ("device", "pin_memory")}
    return func(*_inner(args), **_inner(kwargs))


def _indexed(touched: Any, rest: Sequence[Any], at: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = touched(at, *rest)
    return found
