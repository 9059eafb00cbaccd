"""Variants of DreamerV3 in a run: each resumes exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sheeplike

VARIANTS = (
    "agent.representation=barlow",
    "agent.actor_gradient=dynamics",
    "agent.actor_gradient=both",
)


def run(place: Path, *overrides: str) -> sheeplike.Experiment:
    job = ("exp=dreamer_v3", "env=line", "profile=cpu", "dry_run=true", "compile=off", "total_steps=96")
    job = (*job, "agent.observations=[state]", "agent.replay_ratio=0.25", "eval.every=null", "video_every=null")
    return sheeplike.init(*job, f"run_dir={place}", *overrides)


@pytest.mark.usefixtures("line")
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_is_exact(variant: str, tmp_path: Path) -> None:
    with run(tmp_path / "whole", variant) as whole:
        whole.iterate()
        expected = whole.agent.networks.state_dict()
    with run(tmp_path / "parts", variant) as first:
        first.iterate(64)
    with run(tmp_path / "parts", variant, "resume=auto") as second:
        assert second.policy_steps == 64
        second.iterate()
        for name, value in second.agent.networks.state_dict().items():
            assert torch.equal(value, expected[name]), name
