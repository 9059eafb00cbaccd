"""``dream``: what it refuses, and the program as a whole: it serves its page until Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from lightning.fabric import Fabric

from sheeplike import checkpoint
from sheeplike.config.compose import load
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.run.build import make_agent, make_envs
from sheeplike.run.run_dir import claim
from sheeplike.trained.exported import Spaces

ROOT = Path(__file__).parents[2]
START = 120  # seconds that the program may take


def make_run(*arguments: str) -> None:
    """The directory ``mine`` of a run with a checkpoint of an agent that has learned nothing."""
    config = load([*arguments, "profile=cpu", "dry_run=true", "run_dir=mine"], Sources()).config
    envs = make_envs(config, config.env.num_envs, torch.device("cpu"))
    agent = make_agent(config, envs, Fabric(accelerator="cpu", devices=1))
    with claim(Path("mine"), config):
        pass
    parts = {"agent": agent.state_dict(replay=False), "envs": {}}
    spaces = Spaces.of(envs.single_observation_space, envs.single_action_space).model_dump(mode="json")
    with checkpoint.Writer(Path("mine/checkpoints"), keep_last=9, config=to_data(config)) as writer:
        writer.save(64, parts, {"spaces": spaces}, finite=(), wait=True)
    envs.close()


DEMO = "run=demo:franka_pick"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["dream run=<run_dir>"]),
        (("run=nowhere",), ["run=nowhere", "config.yaml"]),
        (
            ("run=demo:franka",),
            ["demo:franka_pick", f"nearest: {DEMO}"],
        ),
        ((DEMO, "port=70000"), ["port=70000", "65535"]),
        ((DEMO, "port=none"), ["port=none", "nearest: port=8000"]),
        ((DEMO, "proxy=https://hub.example.org/user/me/"), ["proxy=https://", "nearest: proxy=hub.example.org"]),
        ((DEMO, "proxy='*.example.org'"), ["proxy=*.example.org", "nearest: proxy=example.org"]),
        ((DEMO, "proxy='hub.example.org; img-src *'"), ["img-src", "nearest: proxy=hub.example.org"]),
        ((DEMO, "proxy=''"), ["proxy=", "nearest: proxy=localhost:8888"]),
        ((DEMO, "prot=1"), ["'prot'", "nearest: port"]),
        ((DEMO, "checkpoint=best"), ["checkpoint=best", "last"]),
        (
            ("run=demo:franka_pick", "accelerator=cuda"),
            ["accelerator=cuda", "nearest: accelerator=cpu"],
        ),
        (
            ("run=demo:franka_pick_ppo",),
            ["run=demo:franka_pick_ppo", "dreamer_v3"],
        ),
        (("demo:franka_pick", "--config-dir=here"), ["--config-dir", "run=<run_dir>"]),
    ],
)
def test_what_is_refused(refused: Callable[..., str], arguments: tuple[str, ...], parts: list[str]) -> None:
    assert refused("dream", *arguments).names(*parts)


def test_a_run_without_a_checkpoint(refused: Callable[..., str]) -> None:
    config = load(["exp=dreamer_v3", "env=cartpole_balance", "profile=cpu", "run_dir=mine"], Sources()).config
    with claim(Path("mine"), config):
        pass
    assert "run=mine" in refused("dream", "run=mine")


def test_a_port_that_is_taken(refused: Callable[..., str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused("dream", DEMO, f"port={port}")
    found = re.search(r"port=(\d+): .*; nearest: port=(\d+)", line)
    assert found is not None, line
    assert found[1] != found[2]


def test_a_model_that_shows_no_images(refusal: Callable[..., str]) -> None:
    make_run("exp=dreamer_v3", "env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]")
    line = refusal("dream run=mine port=0")
    assert line.names("run=mine", "pixels/*", "depth/*", "agent.observations")


def test_the_help_names_keys_and_the_tunnel(sheeplike: Callable) -> None:
    text = sheeplike("dream", "--help").output
    assert "ssh -L 8000:localhost:8000" in text
    for key in ("run", "checkpoint", "port", "seed", "accelerator"):
        assert re.search(rf"^  {key} ", text, re.MULTILINE)


@pytest.mark.parametrize("run", [pytest.param(DEMO, marks=pytest.mark.slow), "run=mine"])
def test_the_program_serves_its_page_until_it_is_interrupted(run: str) -> None:
    place = Path.cwd()
    if run == "run=mine":
        make_run("exp=dreamer_v3", "env=cartpole_balance", "env.options.episode_length=9", "agent.targets=[]")
    before = sorted(place.rglob("*"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sheeplike", "dream", run, "port=0"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=place, env=environment, **streams) as program:
        try:
            lines = iter(program.stdout.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)))
            with urlopen(url, timeout=60) as page:
                assert "sheeplike dream" in page.read().decode()
            root = url.split("/", 3)
            with pytest.raises(HTTPError, match="403"):
                urlopen("/".join(root[:3]), timeout=60)
            with pytest.raises(HTTPError, match="403"):
                urlopen(Request(url, headers={"Origin": "http://elsewhere.example"}), timeout=60)
            program.send_signal(signal.SIGINT)
            _, error = program.communicate(timeout=START)
        finally:
            program.kill()
    assert program.returncode == 0, error
    assert "Traceback" not in error
    assert sorted(place.rglob("*")) == before
