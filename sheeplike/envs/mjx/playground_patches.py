"""Private parts of MuJoCo Playground that are replaced here; read from version 0.2.0.

On a new version of Playground, compare each of these with the original that it names. :class:`PlaygroundTask` also
reads ``_config`` of Playground's environments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mujoco
from mujoco import mjx

from sheeplike.envs.contract import Unusable
from sheeplike.envs.mjx.patches import drop_warnings


@contextmanager
def use_model(library: Any, env: Any, model: mjx.Model, data: mjx.Data) -> Iterator[None]:
    """Use this model, as Playground's own domain randomization does, and these data in what is traced inside.

    Playground's resets would allocate data in each world, with contacts for all worlds. Replaces ``mjx_env.make_data``
    of the ``library`` and ``_mjx_model`` of the ``env``.
    """

    def make_data(_: mujoco.MjModel, **options: Any) -> mjx.Data:
        placed = ("qpos", "qvel", "ctrl", "act", "mocap_pos", "mocap_quat")
        given = {name: value for name in placed if (value := options.get(name)) is not None}
        return data.replace(**{name: value.reshape(getattr(data, name).shape) for name, value in given.items()})

    with mock.patch.multiple(library, make_data=make_data), mock.patch.object(env, "_mjx_model", model):
        yield


@contextmanager
def refuse_download(id: str, library: Any) -> Iterator[None]:
    """Raise ``Unusable`` if meshes are missing, instead of cloning a repository of gigabytes.

    Replaces ``mjx_env.ensure_menagerie_exists`` of the ``library``.
    """
    place = library.MENAGERIE_PATH

    def refuse() -> None:
        if not place.exists():
            raise Unusable(
                f"id={id!r}: its meshes are not part of MuJoCo Playground and are not on this machine. To fetch them "
                f"(MuJoCo Menagerie, about 2 GB): git clone https://github.com/google-deepmind/mujoco_menagerie.git "
                f"{place} && git -C {place} checkout {library.MENAGERIE_COMMIT_SHA}"
            )

    with mock.patch.object(library, "ensure_menagerie_exists", refuse):
        yield


@contextmanager
def adapt_scenes() -> Iterator[None]:
    """Adapt Playground's scenes that are compiled inside; replaces methods of ``mujoco.MjSpec``.

    - Playground 0.2 compares versions as texts, and so calls a method that MuJoCo 3.3 removed.
    - Sites are not rendered: targets that are sites, as in ``FingerTurnHard``, become geoms that touch nothing.
    """
    drop_warnings()
    spec_class = mujoco.MjSpec
    compile_spec, find_body = spec_class.compile, getattr(spec_class, "find_body", spec_class.body)

    def compile_with_targets(spec: mujoco.MjSpec) -> mujoco.MjModel:
        _show_sites(spec)
        return compile_spec(spec)

    with (
        mock.patch.object(spec_class, "compile", compile_with_targets),
        mock.patch.object(spec_class, "find_body", find_body, create=True),
    ):
        yield


def _show_sites(spec: mujoco.MjSpec) -> None:
    """Give each site that has a material and is in a visible group a geom of its form, without mass."""
    for body in spec.bodies:
        for site in body.sites:
            if site.material and site.group <= 2:
                body.add_geom(
                    **{name: getattr(site, name) for name in ("type", "size", "pos", "quat", "material", "group")},
                    **{"mass": 0.0, "contype": 0, "conaffinity": 0},
                )
