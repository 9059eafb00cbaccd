"""Numbers of a task that may change while it runs, one value per world, such as the difficulty of a curriculum.

They enter the compiled step as arguments, so that a change compiles nothing.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import torch

from sheeplike.options import one_of

Values = float | Sequence[float] | np.ndarray | torch.Tensor
"""One number for all worlds, or (N,) numbers, one per world; on the host."""


class Settings:
    """Settings of all worlds: a copy on the host that changes, and ``on_device`` float32 (N,) for the simulator."""

    def __init__(self, defaults: Mapping[str, float], *, num_envs: int, device: jax.Device) -> None:
        self.num_envs, self._device = num_envs, device
        self._on_host: dict[str, np.ndarray] = {name: np.zeros(num_envs, np.float32) for name in defaults}
        self.on_device: dict[str, jax.Array] = {}
        self.write(defaults)

    def write(self, values: Mapping[str, Values]) -> None:
        """Change the named settings, or none of them if a value is not valid."""
        written = {name: self._checked(name, value) for name, value in values.items()}
        self._on_host |= written
        # `_checked` returns new arrays: on a CPU the device may read the host's memory. They are committed to the
        # device, like all arguments of a step.
        self.on_device |= {name: jax.device_put(value, self._device) for name, value in written.items()}

    def read(self) -> dict[str, torch.Tensor]:
        """Return copies: float32 (N,) CPU tensors by name."""
        return {name: torch.from_numpy(value.copy()) for name, value in self._on_host.items()}

    def check_name(self, name: str) -> str:
        """Return the name; raise ``ValueError`` if there is no such setting."""
        if name not in self._on_host:
            known = one_of(name, sorted(self._on_host)) if self._on_host else "none, as this task has no settings"
            raise ValueError(f"there is no setting {name!r}: expected {known}")
        return name

    def _checked(self, name: str, values: Values) -> np.ndarray:
        self.check_name(name)
        given = np.asarray(values)
        if given.dtype.kind not in "iuf" or given.shape not in ((), (self.num_envs,)):
            expected = f"expected one number or {self.num_envs} of them on the host, one per world"
            raise ValueError(f"{name}: got {given.dtype} {given.shape}: {expected}")
        checked = np.array(np.broadcast_to(_float32(given), (self.num_envs,)))
        for world in np.flatnonzero(~np.isfinite(checked))[:1]:
            raise ValueError(f"{name}={checked[world]} in world {world}: expected a finite number")
        return checked


def _float32(values: object) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite, and is refused
        return np.asarray(values).astype(np.float32)
