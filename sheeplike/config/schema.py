"""Every key of a run with its type, default, range and meaning, and the checks that need several keys.

An agent's options stand beside the agent; ``configs/`` holds what differs from the defaults for a task or a machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializeAsAny, field_validator

from sheeplike import envs
from sheeplike.agents import registry
from sheeplike.agents.config import AgentConfig
from sheeplike.config.errors import UnknownKey, as_command_errors, validated
from sheeplike.entry_points import Registry
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.randomization.spec import parse
from sheeplike.options import (
    CONDITION,
    HEADLINE,
    INCIDENTAL,
    OWN_CHOICE,
    RESUMABLE,
    CommandError,
    InvalidOption,
    Key,
    Options,
    format_value,
    keys_of,
)

# The encoder halves an image four times and must end at 3 to 16 pixels a side.
Side = Annotated[int, Field(ge=48, le=256, multiple_of=16)]
ByCamera = Annotated[dict[str, Side | tuple[Side, Side]], Field(min_length=1)]


class Worlds(Options):
    """Keys of every environment."""

    name: Annotated[str, HEADLINE] = Field(description="the task, or a family of environments")
    id: Annotated[str | None, HEADLINE] = Field(
        None, description="environment of a family, such as CheetahRun of playground; null: env.name is a single task"
    )
    num_envs: Annotated[int, HEADLINE, OWN_CHOICE] = Field(
        16, ge=1, le=2**20, description="worlds simulated side by side"
    )
    image_size: Annotated[Side | tuple[Side, Side] | ByCamera, HEADLINE] = Field(
        48, description="pixels a side, or [height,width]; or of each camera, {front:64,wrist:[48,64]}"
    )
    action_repeat: Annotated[int, HEADLINE] = Field(
        1, ge=1, le=1000, description="control steps for which an action is held"
    )


class Env(SimulationOptions, Worlds):
    """Keys of an environment; those of ``SimulationOptions`` are for environments that are simulated here."""

    stagger: bool = Field(
        True, description="end first episodes at random times, so that simulated worlds are not in step"
    )
    options: dict[str, Any] = Field({}, description="further arguments of the task, by name")

    @field_validator("options")
    @classmethod
    def _can_be_saved(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            expected = "texts as keys, and values that config.yaml gives back as they are"
            raise CommandError(f"env.options={format_value(value)}: expected {expected}")
        return value

    @property
    def task(self) -> str:
        """Name of the task, and of its family if it has one: tells it from all others."""
        return self.name if self.id is None else f"{self.name} {self.id}"


class Eval(Options):
    every: Annotated[int | None, INCIDENTAL] = Field(
        20_000, ge=1, le=10**12, description="policy steps between two evaluations; null: none"
    )
    episodes: Annotated[int, INCIDENTAL] = Field(16, ge=1, le=2**16, description="episodes of one evaluation")
    num_envs: Annotated[int | None, INCIDENTAL] = Field(
        None, ge=1, le=2**16, description="worlds of an evaluation, at most one per episode; null: at most env.num_envs"
    )
    sample: bool = Field(True, description="sample the policy's actions, as published scores do, or take its mode")
    randomize: bool = Field(True, description="apply the run's randomization")
    video: Annotated[bool, INCIDENTAL] = Field(True, description="log a video of each evaluation")


class Checkpoint(Options):
    every: int | None = Field(
        20_000, ge=1, le=10**12, description="policy steps between two checkpoints; null: only at the end"
    )
    keep_last: int = Field(2, ge=1, le=10**12, description="newest checkpoints kept")
    keep_best: int = Field(
        1, ge=0, le=10**12, description="further checkpoints kept, those with the highest eval/return_mean"
    )
    replay: bool = Field(
        True, description="save the replay or the rollout too; otherwise a resumed run starts with an empty one"
    )
    mirror: str | None = Field(
        None, min_length=1, description="URL, such as s3://bucket/prefix, of copies from which resume=auto goes on"
    )


class Fabric(Options):
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = Field(
        "auto", description="device; auto: a GPU if one is usable; gpu means cuda"
    )
    precision: Annotated[Literal["32-true", "bf16-mixed"], HEADLINE] = Field(
        "32-true", description="floating-point precision of training; on a GPU cuDNN's convolutions take TF32"
    )
    threads: int | None = Field(None, ge=1, le=2**12, description="threads of torch on a CPU; null: one per core")
    devices: Annotated[int, RESUMABLE] = Field(
        1, ge=1, le=2**10, description="devices of each node; one process, a rank, trains on each"
    )
    num_nodes: Annotated[int, RESUMABLE] = Field(1, ge=1, le=2**12, description="nodes, each with as many devices")
    timeout: Annotated[float, RESUMABLE, INCIDENTAL] = Field(
        600, ge=10, le=86_400, description="seconds that a rank waits for another before the run ends"
    )
    deterministic: bool = Field(
        False, description="bit-identical results of torch and JAX on a GPU too, at some cost; on a CPU they always are"
    )
    deterministic_physics: bool = Field(
        False, description="bit-identical physics and rendering by Warp on a GPU; some kernels have no such form"
    )


class Data(Options):
    """Recorded episodes to learn from."""

    path: str | None = Field(
        None, min_length=1, description="directory or file of recorded episodes, put into the replay before the run"
    )
    format: Literal["npz", "parquet", "minari", "lerobot"] | None = Field(
        None, description="layout of the files; null: found out"
    )
    keys: dict[str, str] = Field({}, description="observation to its name in the files, such as {pixels/front:image}")
    episodes: int | None = Field(None, ge=1, le=10**9, description="episodes to take, the first ones; null: all")
    fraction: float | None = Field(
        None, gt=0, lt=1, description="share of every batch from these episodes; null: as likely as others"
    )
    updates: Annotated[int | None, RESUMABLE, INCIDENTAL] = Field(
        None, ge=1, le=10**12, description="gradient steps, and the steps of all intervals, with total_steps=0"
    )
    held_out: float = Field(
        0.0, ge=0, le=0.9, description="share of the episodes kept for held_out/nll, computed at every evaluation"
    )


LOGGERS = Registry(
    "logger",
    "sheeplike.loggers",
    {
        "tensorboard": "sheeplike.monitor.logger:EventFile",
        "wandb": "sheeplike.monitor.sinks:WandB",
        "mlflow": "sheeplike.monitor.sinks:MLflow",
    },
    what="logger",
)


class Config(Options):
    """A whole configuration, checked."""

    exp: str = Field(description="the recipe")
    profile: Annotated[str, HEADLINE, INCIDENTAL] = Field(
        "auto", description="the machine's profile; auto: gpu if a GPU is usable, else cpu"
    )
    seed: Annotated[int, RESUMABLE, HEADLINE, INCIDENTAL] = Field(
        0, ge=0, le=2**31 - 1, description="seed of environments, parameters and sampling"
    )
    total_steps: Annotated[int, RESUMABLE, INCIDENTAL] = Field(
        1_000_000, ge=0, le=10**12, description="policy steps of the whole run; 0: learn from data.path alone"
    )
    run_dir: Annotated[str | None, INCIDENTAL] = Field(
        None,
        min_length=1,
        description="directory of the run; null: logs/<env>[/<id>][/<randomization>]/<agent>[/<exp>]/seed_<seed>",
    )
    scale: Literal["strong", "weak"] = Field(
        "strong",
        description="worlds, batch, replay and steps are, strong: those of all ranks together; weak: those of each, as "
        "if it were alone",
    )
    compile: Annotated[Literal["auto", "off", "inductor", "graph"], RESUMABLE, INCIDENTAL] = Field(
        "auto",
        description="off: eager; inductor: kernels fused by torch.compile; graph: that, captured as one CUDA graph; "
        "auto: the fastest that works on the machine",
    )
    dry_run: Annotated[bool, INCIDENTAL] = Field(False, description="short run through every stage")
    log_every: Annotated[int, RESUMABLE, INCIDENTAL] = Field(
        1_000, ge=1, le=10**12, description="policy steps between two rows of metrics"
    )
    video_every: Annotated[int | None, RESUMABLE, INCIDENTAL] = Field(
        20_000, ge=1, le=10**12, description="policy steps between two videos of the world model; null: none"
    )
    max_skipped: Annotated[int, RESUMABLE, INCIDENTAL] = Field(
        10,
        ge=1,
        le=10**12,
        description="updates skipped in a row, for a non-finite loss or gradient, before the run stops",
    )
    watchdog: Annotated[float | None, RESUMABLE, INCIDENTAL] = Field(
        600,
        ge=1,
        le=10**7,
        description="seconds without an iteration before the stacks of all threads are printed; null: never",
    )
    env: Annotated[Env, CONDITION] = Field(description="the task and its worlds")
    randomization: Annotated[dict[str, Any], HEADLINE, CONDITION] = Field(
        {}, description="quantities that differ between worlds and episodes, line by line; randomization=none: none"
    )
    agent: SerializeAsAny[AgentConfig] = Field(description="algorithm and hyperparameters")
    eval: Annotated[Eval, RESUMABLE, CONDITION] = Field(Eval(), description="evaluation, in separate environments")
    data: Annotated[Data, CONDITION] = Field(Data(), description="recorded episodes to learn from")
    checkpoint: Annotated[Checkpoint, RESUMABLE, INCIDENTAL] = Field(Checkpoint(), description="checkpoints")
    fabric: Fabric = Field(Fabric(), description="device and precision")
    logger: Annotated[tuple[str, ...], RESUMABLE, INCIDENTAL] = Field(
        ("tensorboard",),
        description="destinations beside metrics.jsonl: tensorboard, wandb, mlflow, and those of installed packages",
    )

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return self.fabric.devices * self.fabric.num_nodes

    @property
    def offline(self) -> bool:
        """True if the run learns from recorded episodes alone."""
        return self.data.updates is not None

    @property
    def last_step(self) -> int:
        """Steps of the whole run: policy steps, or the gradient steps of a run that takes none."""
        return self.total_steps if self.data.updates is None else self.data.updates

    @property
    def unit(self) -> str:
        """Unit of :attr:`last_step`."""
        return "gradient steps" if self.offline else "policy steps"

    def whole(self) -> Self:
        """Return the configuration of all ranks together: ``scale=weak`` multiplies what stands here."""
        if self.scale == "strong" or self.ranks == 1:
            return self
        env = self.env.replace(num_envs=self.env.num_envs * self.ranks)
        return self.replace(env=env, agent=self.agent.multiply(self.ranks), total_steps=self.total_steps * self.ranks)

    def share(self) -> Self:
        """Return the configuration of one rank: its worlds, and its part of batch, replay and evaluation."""
        if self.ranks == 1:
            return self
        num_envs, asked = self.env.num_envs // self.ranks, self.eval
        asked = asked.replace(episodes=asked.episodes // self.ranks, num_envs=(asked.num_envs or 0) // self.ranks)
        agent = self.agent.divide(self.ranks, num_envs)
        return self.replace(env=self.env.replace(num_envs=num_envs), agent=agent, eval=asked)


class Start(Options):
    """Keys of the command line alone; they are not saved with the run."""

    resume: str | None = Field(
        None, description="run directory to resume, or auto: resume the run in run_dir if there is one, else begin it"
    )
    seeds: int | tuple[int, ...] | None = Field(
        None, description="train once per seed: a number of seeds, counted from seed, or a list of them"
    )
    show: Literal["config"] | None = Field(None, description="config: print every value with its source, and stop")


def all_keys(*agents: type[AgentConfig]) -> Iterator[Key]:
    """Yield every key of a configuration, sections before their keys, with those of ``agents`` under ``agent.*``."""
    for key in keys_of(Config):
        if not key.path.startswith("agent."):
            yield key
        if key.path == "agent":
            for options in agents:
                yield from keys_of(options, "agent.")


def validate(data: Mapping[str, Any]) -> Config:
    """Return the configuration that ``data``, nested dictionaries of plain values, describes.

    Options that follow from others are filled in: the agent's, ``eval.num_envs`` and ``fabric.accelerator=gpu``.
    InvalidOption for a wrong value or one that contradicts another, CommandError for a missing or unknown key.
    """
    agent = data.get("agent")
    if isinstance(agent, Mapping):
        with as_command_errors(ValueError):
            spec = registry.find(agent.get("name"))
        for name in agent:
            if name not in {field.alias or key for key, field in spec.config.model_fields.items()}:
                others = [o.model_fields["name"].default for o in registry.built_in() if name in o.model_fields]
                elsewhere = f"{agent['name']} has no such key; it is a key of {' and '.join(others)}" if others else ""
                raise UnknownKey(f"agent.{name}", list(keys_of(spec.config, "agent.")), elsewhere)
        data = {**data, "agent": validated(spec.config, agent, "agent.")}
    config = validated(Config, data)
    env = config.env
    if re.search(r"://[^/]*:.*@|[?]", config.checkpoint.mirror or ""):  # the URL is not shown
        raise CommandError(
            "checkpoint.mirror: expected a URL without password and query; credentials stand in environment variables, "
            "for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in files of the cloud's own tools"
        )
    with as_command_errors(ValueError):
        _check_env(config)
        _check_data(config)
        total_steps = 10**12 if config.offline else config.total_steps
        agent = config.agent.check(num_envs=env.num_envs, total_steps=total_steps)
    episodes = config.eval.episodes
    envs_of_all = env.num_envs * (config.ranks if config.scale == "weak" else 1)
    eval_envs = min(config.eval.num_envs or envs_of_all, episodes)
    _check_ranks(config, eval_envs)
    accelerator = {"gpu": "cuda"}.get(config.fabric.accelerator, config.fabric.accelerator)
    return config.replace(
        agent=agent, eval=config.eval.replace(num_envs=eval_envs), fabric=config.fabric.replace(accelerator=accelerator)
    )


def to_data(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of plain values."""
    return config.model_dump(mode="json", by_alias=True)


def _check_env(config: Config) -> None:
    """Raise for invalid options of the environment, and for malformed randomization."""
    env = config.env
    try:
        envs.check(
            env.name,
            id=env.id,
            options=env.options,
            image_size=env.image_size,
            randomization=config.randomization,
            randomize=config.eval.randomize,
            simulation=env,
        )
    except InvalidOption as error:
        if error.key == "options":  # the error's value is the name of an unknown option
            hint = f"; nearest: env.options.{error.nearest}" if error.nearest else ""
            raise CommandError(f"unknown key 'env.options.{error.value}': expected {error.expected}{hint}") from None
        paths = {"randomization": "randomization", "randomize": "eval.randomize"}
        path = f"env.{error.key}" if error.key in Env.model_fields else f"env.options.{error.key}"
        raise InvalidOption(paths.get(error.key, path), error.value, error.expected, error.nearest) from None
    parse(config.randomization)


def _check_data(config: Config) -> None:
    """Raise for keys of recorded episodes that contradict one another, or the agent."""
    data = config.data
    if data.path is None:
        for name, value in data.model_dump(exclude_defaults=True).items():
            raise InvalidOption(f"data.{name}", value, "data.path= beside it")
    elif not config.agent.has_replay:
        raise InvalidOption("data.path", data.path, f"null: {config.agent.name} learns from its own episodes alone")
    elif config.ranks > 1:
        raise InvalidOption("fabric.devices", config.fabric.devices, "1 beside data.path=, on one node", 1)
    if data.fraction is not None and getattr(config.agent, "batch_size", 2) < 2:
        raise InvalidOption("agent.batch_size", 1, "at least 2 beside data.fraction, a share of each batch", 2)
    if data.updates is not None and config.total_steps:
        raise InvalidOption("total_steps", config.total_steps, "0 beside data.updates: it takes no policy steps", 0)
    if data.updates is not None and data.fraction is not None:
        raise InvalidOption("data.fraction", data.fraction, "null beside data.updates: all of a batch is recorded")
    if data.updates is None and not config.total_steps:
        raise InvalidOption("total_steps", 0, "at least 1, or data.path= and data.updates= to learn from alone", 1000)


def _check_ranks(config: Config, eval_envs: int) -> None:
    """Raise for numbers that cannot be divided by the ranks."""
    ranks = config.ranks
    if ranks == 1:
        return
    with as_command_errors(ValueError):
        whole = config.whole()
    numbers = {"env.num_envs": whole.env.num_envs, "eval.episodes": config.eval.episodes, "eval.num_envs": eval_envs}
    for key, number in numbers.items():
        if number % ranks:
            expected = f"a multiple of the {ranks} ranks (fabric.devices x fabric.num_nodes)"
            raise InvalidOption(key, number, expected, max(round(number / ranks), 1) * ranks)
    with as_command_errors(ValueError):
        whole.agent.divide(ranks, whole.env.num_envs // ranks)
