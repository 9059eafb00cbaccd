"""MuJoCo's own engine, on all cores of a CPU: some forty times as fast there as kernels made for a GPU.

Each call copies JAX's float32 arrays into the engine, and its results into new arrays. So a step depends only on the
saved state, not on the number of threads.
"""

from collections.abc import Callable, Collection, Iterable

import jax
import mujoco
import numpy as np
from mujoco import mjx
from mujoco.batch import MODEL_FIELDS, Batch, SimulationError

from sheeplike.envs.mjx.host_call import call_for_all
from sheeplike.envs.mjx.patches import drop_warnings
from sheeplike.envs.mjx.physics.physics import INPUTS, POSES, Physics
from sheeplike.envs.mjx.randomization.draw import Randomization
from sheeplike.envs.mjx.randomization.fields import DERIVED, leaf
from sheeplike.envs.mjx.task import World
from sheeplike.host import cpu_cores

STEPPED = ("qpos", "qvel", "act", "qacc_warmstart", "time")  # the inputs that a step changes

_OWN_NAMES = {"opt.impratio_invsqrt": "opt.impratio"}
_WARPS_NAMES = {own: name for name, own in _OWN_NAMES.items()}
_CONVERTED = {"opt.impratio": lambda inverse_root: inverse_root**-2.0}
"""Conversions to MuJoCo's form of a number, for those that Warp keeps in another form."""

DIVERGED = [int(getattr(mujoco.mjtWarning, f"mjWARN_{name}")) for name in ("BADQPOS", "BADQVEL", "BADQACC", "INERTIA")]
"""Warnings after which MuJoCo silently resets a world to the model's defaults."""


class NativePhysics(Physics):
    """Steps worlds with ``mujoco.batch``, on as many ``threads``; Warp's own ``data._impl`` stays empty."""

    derives_constants = True

    def __init__(self, task: World, *, num_envs: int, device: jax.Device, threads: int | None = None) -> None:
        if device.platform != "cpu":
            raise ValueError("physics='native' steps worlds that live on a CPU: expected 'warp' on a GPU")
        super().__init__(task, num_envs=num_envs, device=device)
        drop_warnings()
        self._scene, self._threads = task.model, threads or cpu_cores()
        self._inputs = self._not_empty(INPUTS)
        own = ("_impl", "history", "userdata", "plugin_state")
        self._derived = self._not_empty(f.name for f in mjx.Data.fields() if f.name not in (*INPUTS, *own))
        self._stepped = (*self._not_empty(STEPPED), *self._derived)
        self._poses = self._not_empty(POSES)
        self._varied: tuple[str, ...] = ()

    def lacks(self, randomization: Randomization, read: Iterable[str]) -> str | None:
        if self._scene.nhistory:
            return "the scene's delays, which Warp alone carries over"
        if self._scene.opt.enableflags & mujoco.mjtEnableBit.mjENBL_SLEEP:
            return "the scene's flag sleep, which Warp alone serves"
        for body in randomization.rows("body_ipos", "body_iquat"):
            if self._scene.body_simple[body]:
                return f"body_ipos or body_iquat of {self._scene.body(body).name} to vary, which Warp alone can do"
        return next((f"data.{name}, which Warp alone has" for name in read if name.startswith("_impl.")), None)

    def saves(self, leaf: str) -> bool:
        return "._impl." not in leaf

    def _not_empty(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if getattr(self.template, name).size)

    def vary(self, fields: Collection[str]) -> None:
        own_names = {_OWN_NAMES.get(path, path) for path in fields}
        self._varied = tuple(sorted((MODEL_FIELDS & own_names) - DERIVED.keys()))  # MuJoCo derives those itself
        self._batch = Batch(self._scene, self.num_envs, self._threads)
        self._expanded = {name: self._batch.expand(name) for name in self._varied}
        # An array bound only later would be zeros until the next call.
        for name in self._derived:
            self._batch.bind(name)

    def step(self, model: mjx.Model, data: mjx.Data, substeps: int = 1) -> mjx.Data:
        return self._compute(self._step_all, self._stepped, model, data, substeps)

    def forward(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return self._compute(self._forward_all, self._derived, model, data, int(mujoco.mjtStage.mjSTAGE_ACC))

    def kinematics(self, model: mjx.Model, data: mjx.Data) -> mjx.Data:
        return self._compute(self._forward_all, self._poses, model, data, int(mujoco.mjtStage.mjSTAGE_POS))

    def _compute(
        self, method: Callable[..., None], outputs: tuple[str, ...], model: mjx.Model, data: mjx.Data, number: int
    ) -> mjx.Data:
        """Replace fields of ``data`` by the ``outputs`` that ``method(number, *inputs, *fields, *outputs)`` fills."""
        inputs = [getattr(data, name) for name in self._inputs] + [_field(model, path) for path in self._varied]
        shapes = [getattr(self.template, name) for name in outputs]
        computed = call_for_all(method, number, inputs, shapes, num_envs=self.num_envs)
        return data.replace(**dict(zip(outputs, computed, strict=True)))

    def _step_all(self, substeps: int, *arrays: np.ndarray) -> None:
        outputs = self._load(arrays)
        batch = self._batch
        batch.warning[:] = 0
        failed = np.zeros(self.num_envs, bool)
        try:
            batch.step(nstep=substeps)
        except SimulationError as error:  # the other worlds have been stepped
            failed[error.ids] = True
        self._deliver(self._stepped, outputs)
        # NaN, as from any engine: the simulator ends the episode of such a world. Entry 1 counts a warning.
        failed |= batch.warning[:, DIVERGED, 1].any(1)
        outputs[0][failed] = np.nan

    def _forward_all(self, stage: int, *arrays: np.ndarray) -> None:
        outputs = self._load(arrays)
        self._batch.forward(stage=stage)
        self._deliver(self._poses if stage == mujoco.mjtStage.mjSTAGE_POS else self._derived, outputs)

    def _load(self, arrays: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Give the inputs and the fields that vary to the engine; return the other arrays, its outputs."""
        batch, inputs = self._batch, len(self._inputs)
        for name, values in zip(self._inputs, arrays, strict=False):
            batch.bind(name)[...] = values
        changed = np.zeros(self.num_envs, bool)
        for name, values in zip(self._varied, arrays[inputs:], strict=False):
            own = self._expanded[name]
            values = _CONVERTED.get(name, np.asarray)(values).reshape(own.shape)
            differs = (own != values.astype(own.dtype)).reshape(self.num_envs, -1).any(1)
            own[differs] = values[differs]
            changed |= differs
        if changed.any():
            batch.set_const(np.flatnonzero(changed))
        return arrays[inputs + len(self._varied) :]

    def _deliver(self, names: tuple[str, ...], outputs: tuple[np.ndarray, ...]) -> None:
        for name, output in zip(names, outputs, strict=True):
            output[...] = self._batch.bind(name).reshape(output.shape)


def _field(model: mjx.Model, path: str) -> jax.Array:
    """Return a field by MuJoCo's name of it."""
    owner, _, name = _WARPS_NAMES.get(path, path).rpartition(".")
    return leaf(model.opt if owner else model, name)
