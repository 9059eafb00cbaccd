"""Runs that are older than a key of their configuration: what they did, now that it can be chosen."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

DEFAULTS = {
    "compile": "off",
    "watchdog": 600.0,
    "randomization": {},
    "faults": {"max_skipped": 10, "max_rollbacks": 1},
    "fabric.deterministic": False,
    "fabric.threads": None,
    "eval.nominal": False,
    "env.action_repeat": 1,
    "env.id": None,
    "env.renderer": "warp",
    "env.segmentation": False,
    "env.shadows": False,
    "env.textures": None,
}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with the keys that are younger than it; a section that it lacks as a whole stays away."""
    config = dict(config)
    for path, default in DEFAULTS.items():
        section, _, key = path.rpartition(".")
        if not section:
            config.setdefault(key, copy.deepcopy(default))
        elif isinstance(config.get(section), Mapping):
            config[section] = {key: default, **config[section]}
    if "agent" in config:
        config["agent"] = completed_agent(config["agent"])
    checkpoint = config.get("checkpoint")
    if isinstance(checkpoint, Mapping) and "keep" in checkpoint:  # as it was called once
        others = {key: value for key, value in checkpoint.items() if key != "keep"}
        config["checkpoint"] = {"keep_last": checkpoint["keep"], "keep_best": 1, **others}
    return config


def completed_agent(section: Any) -> Any:
    """The section ``agent`` of a run, or of an export, likewise."""
    if isinstance(section, Mapping) and section.get("name") == "dreamer_v3":
        # One number once served the latents and a discrete policy.
        return {"targets": [], "policy_unimix": section.get("unimix", 0.01), **section}
    return section
