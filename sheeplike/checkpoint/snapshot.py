"""Copies of a state in the host's memory, and whether they may be written at all."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class NonFinite(ValueError):
    """A state that must not be saved holds NaN or infinity; the message names the tensor."""


def tensors(where: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a state with their places in it."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from tensors(f"{where}[{key!r}]", entry)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from tensors(f"{where}[{index}]", entry)


def check_finite(parts: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise :class:`NonFinite` for the first floating tensor of these parts that is not finite.

    One reduction per tensor, on its device, and one read by the host per device.
    """
    found = [item for name in names if name in parts for item in tensors(name, parts[name])]
    found = [(where, value.detach()) for where, value in found if value.is_floating_point() or value.is_complex()]
    devices: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for where, value in found:
        devices.setdefault(value.device, []).append((where, value.isfinite().all()))
    for checks in devices.values():
        good = torch.stack([check for _, check in checks]).tolist()
        for (where, _), is_good in zip(checks, good, strict=True):
            if not is_good:
                raise NonFinite(f"{where} holds NaN or infinity: it is not saved")


def size(parts: Mapping[str, Any]) -> int:
    """Bytes that :func:`take` would allocate."""
    return sum(value.nbytes for name, part in parts.items() for _, value in tensors(name, part))


def take(value: Any) -> Any:
    """A copy in the host's memory that shares nothing with ``value``."""
    return _rebuilt(value, lambda tensor: tensor.to("cpu", copy=True))


def trim(value: Any) -> Any:
    """``value`` without tensors that are views of more: such a one would be written with all that is behind it."""

    def trimmed(tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()

    return _rebuilt(value, trimmed)


def _rebuilt(value: Any, of_tensor: Any) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(of_tensor(value.detach()), requires_grad=value.requires_grad)
    if isinstance(value, Tensor):
        return of_tensor(value.detach())
    if isinstance(value, OrderedDict):
        result = OrderedDict((key, _rebuilt(entry, of_tensor)) for key, entry in value.items())
        result.__dict__.update(copy.deepcopy(value.__dict__))  # the versions of modules, in their state dicts
        return result
    if isinstance(value, dict):
        return {key: _rebuilt(entry, of_tensor) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rebuilt(entry, of_tensor) for entry in value]
    if type(value) is tuple:
        return tuple(_rebuilt(entry, of_tensor) for entry in value)
    return set(value) if isinstance(value, set) else value
