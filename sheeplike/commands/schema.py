"""Every key of the configuration: its type, its range and what it means.

Checking, nearest matches, error messages and ``--help`` all come from these classes; the defaults are in ``configs/``.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Rule(NamedTuple):
    """What a key means and what its value must be, beside its type.

    Attributes:
        doc: one line for a reader.
        at_least, at_most, above, below, multiple_of: limits of a number.
        choices: the only valid texts.
        names: the keys that a dict must have, exactly.
        open: a dict may have any keys.
        empty: a list may have no entries.
    """

    doc: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    choices: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    open: bool = False
    empty: bool = False


@dataclass(frozen=True, kw_only=True)
class Env:
    name: Annotated[str, Rule("the task, or a family of environments")]
    id: Annotated[str | None, Rule("which of a family, such as CheetahRun of playground; null: the name says it all")]
    num_envs: Annotated[int, Rule("worlds simulated side by side", at_least=1)]
    # The encoder halves an image four times and must end at 3 to 16 pixels a side.
    image_size: Annotated[
        int | tuple[int, int] | dict[str, int | tuple[int, int]],
        Rule(
            "pixels a side, or [height,width]; or of each camera, {front:64,wrist:[48,64]}",
            at_least=48,
            at_most=256,
            multiple_of=16,
        ),
    ]
    cameras: Annotated[tuple[str, ...] | None, Rule("names of the cameras to render; null: all, or the task's choice")]
    renderer: Annotated[
        str,
        Rule(
            "warp: MJX-Warp's; madrona: where that is installed; none: no images, for agents that see vectors alone",
            choices=("warp", "madrona", "none"),
        ),
    ]
    depth: Annotated[bool, Rule("render depth beside the colours")]
    segmentation: Annotated[bool, Rule("render which geom each pixel shows, beside the colours")]
    shadows: Annotated[bool, Rule("render the shadows of lights that cast any")]
    textures: Annotated[bool | None, Rule("render the textures of materials; null: if the task says so")]
    action_repeat: Annotated[int, Rule("control steps for which an action is held", at_least=1)]
    options: Annotated[dict[str, Any], Rule("further arguments of the task, by name", open=True)]

    @property
    def task(self) -> str:
        """What tells the task from others: the name, and which of a family."""
        return self.name if self.id is None else f"{self.name} {self.id}"


@dataclass(frozen=True, kw_only=True)
class Size:
    name: Annotated[str, Rule("name of the preset")]
    deter: Annotated[int, Rule("width of the recurrent state", at_least=8, multiple_of=8)]
    hidden: Annotated[int, Rule("width of the recurrent model's hidden layers", at_least=1)]
    classes: Annotated[int, Rule("classes of each of the 32 categorical latents", at_least=2, at_most=256)]
    depth: Annotated[int, Rule("base channels of the convolutions", at_least=2, multiple_of=2)]
    units: Annotated[int, Rule("width of the encoder's, decoder's and heads' layers", at_least=1)]


@dataclass(frozen=True, kw_only=True)
class DreamerV3:
    name: Annotated[str, Rule("the algorithm", choices=("dreamer_v3",))]
    observations: Annotated[
        tuple[str, ...], Rule("glob patterns of the observations that the agent sees, such as pixels/*")
    ]
    targets: Annotated[
        tuple[str, ...],
        Rule(
            "of those that it predicts without seeing them, such as privileged_state, to shape its latents", empty=True
        ),
    ]
    size: Annotated[Size, Rule("widths of the model; agent/size=<name> chooses a preset")]
    replay_ratio: Annotated[float, Rule("gradient steps per policy step after learning_starts", above=0)]
    replay_size: Annotated[int, Rule("policy steps kept for replay, over all worlds", at_least=1)]
    batch_size: Annotated[int, Rule("sequences per gradient step", at_least=1)]
    batch_length: Annotated[int, Rule("time steps per sequence", at_least=2)]
    learning_rate: Annotated[float, Rule("step size after the warm-up", above=0, at_most=1)]
    warmup: Annotated[int, Rule("gradient steps over which the learning rate rises from 0", at_least=0)]
    beta1: Annotated[float, Rule("decay of the momentum", at_least=0, below=1)]
    beta2: Annotated[float, Rule("decay of the squared gradient", at_least=0, below=1)]
    eps: Annotated[float, Rule("added to the root of the squared gradient", above=0)]
    agc: Annotated[float, Rule("largest gradient norm, relative to its parameter's norm", above=0)]
    unimix: Annotated[float, Rule("share of a uniform distribution in the latents", at_least=0, below=1)]
    policy_unimix: Annotated[
        float, Rule("share of a uniform distribution in a discrete policy; the paper has 0.01", at_least=0, below=1)
    ]
    kl_free_nats: Annotated[float, Rule("nats of KL divergence that cost nothing", at_least=0)]
    imagination_length: Annotated[int, Rule("imagined time steps", at_least=1)]
    horizon: Annotated[float, Rule("discount horizon in time steps: 1 / (1 - discount)", above=1)]
    return_lambda: Annotated[float, Rule("mixing of the lambda-returns", at_least=0, at_most=1)]
    entropy_scale: Annotated[float, Rule("weight of the policy's entropy", at_least=0)]
    slow_critic_rate: Annotated[
        float, Rule("how far the slow critic moves after each gradient step", above=0, at_most=1)
    ]
    loss_scales: Annotated[
        dict[str, float],
        Rule(
            "weight of each loss",
            at_least=0,
            names=("reconstruction", "reward", "continue", "dyn", "rep", "policy", "value", "replay_value"),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Vision:
    layout: Annotated[str, Rule("the convolutions", choices=("max_pool", "nature"))]
    head: Annotated[
        str, Rule("what becomes of the last feature map", choices=("flatten", "average", "max", "spatial_softmax"))
    ]
    normalise_channels: Annotated[bool, Rule("whiten each channel of each image, without parameters")]
    shared: Annotated[bool, Rule("one network for all cameras, or one for each")]


@dataclass(frozen=True, kw_only=True)
class PPO:
    name: Annotated[str, Rule("the algorithm", choices=("ppo",))]
    observations: Annotated[
        tuple[str, ...], Rule("glob patterns of the observations that the policy sees, such as pixels/*")
    ]
    value_observations: Annotated[
        tuple[str, ...] | None, Rule("of those that the value sees, such as privileged_state; null: the same")
    ]
    frame_stack: Annotated[int, Rule("frames that an image consists of", at_least=1, at_most=16)]
    augment: Annotated[bool, Rule("move all images of a trajectory by a random few pixels")]
    vision: Annotated[Vision, Rule("how images are seen")]
    activation: Annotated[str, Rule("between layers", choices=("elu", "relu", "silu", "tanh"))]
    policy_layers: Annotated[tuple[int, ...], Rule("widths of the policy's hidden layers", at_least=1)]
    value_layers: Annotated[tuple[int, ...], Rule("widths of the value's hidden layers", at_least=1)]
    shared_trunk: Annotated[bool, Rule("policy and value see through the same convolutions")]
    distribution: Annotated[
        str,
        Rule(
            "of actions; auto: tanh_normal, or categorical where actions are discrete",
            choices=("auto", "tanh_normal", "clipped_normal", "categorical"),
        ),
    ]
    rollout_length: Annotated[int, Rule("steps of every world between two updates", at_least=1)]
    minibatches: Annotated[int, Rule("parts of a rollout, one gradient step each", at_least=1)]
    epochs: Annotated[int, Rule("passes over a rollout", at_least=1)]
    discount: Annotated[float, Rule("of future rewards", at_least=0, below=1)]
    gae_lambda: Annotated[float, Rule("mixing of the advantage estimates", at_least=0, at_most=1)]
    reward_scaling: Annotated[float, Rule("factor of all rewards", above=0)]
    learning_rate: Annotated[float, Rule("step size of Adam", above=0, at_most=1)]
    max_grad_norm: Annotated[float, Rule("largest norm of all gradients together", above=0)]
    clip: Annotated[float, Rule("how far the ratio of probabilities may leave 1", above=0)]
    value_clip: Annotated[float | None, Rule("how far a value may move; null: any distance", above=0)]
    value_scale: Annotated[float, Rule("weight of the value's loss", at_least=0)]
    entropy_scale: Annotated[float, Rule("weight of the policy's entropy", at_least=0)]
    normalise_advantage: Annotated[bool, Rule("mean 0 and deviation 1 in each minibatch")]
    kl_control: Annotated[
        str,
        Rule(
            "what happens when the policy moves by more than kl_target", choices=("none", "early_stop", "adaptive_lr")
        ),
    ]
    kl_target: Annotated[float, Rule("nats of KL divergence between two policies", above=0)]


Agent = DreamerV3 | PPO  # which one, its name tells; those of other packages are in AGENTS


@dataclass(frozen=True, kw_only=True)
class Eval:
    every: Annotated[int | None, Rule("policy steps between two evaluations; null: none", at_least=1)]
    episodes: Annotated[int, Rule("episodes of one evaluation", at_least=1)]
    num_envs: Annotated[
        int | None, Rule("worlds of an evaluation; null: one per episode, at most env.num_envs", at_least=1)
    ]
    sample: Annotated[bool, Rule("sample the policy's actions, as published scores do, or take its mode")]
    nominal: Annotated[bool, Rule("evaluate in the scene as it was compiled, without randomization")]
    video: Annotated[bool, Rule("log a video of each evaluation")]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    every: Annotated[int | None, Rule("policy steps between two checkpoints; null: only at the end", at_least=1)]
    keep_last: Annotated[int, Rule("newest checkpoints kept", at_least=1)]
    keep_best: Annotated[int, Rule("checkpoints kept beside them for having the highest eval/return_mean", at_least=0)]
    replay: Annotated[
        bool, Rule("save the replay or the rollout too; without it a resumed run starts with an empty one")
    ]


@dataclass(frozen=True, kw_only=True)
class Faults:
    max_skipped: Annotated[
        int, Rule("updates in a row skipped for a non-finite loss or gradient, before the run goes back", at_least=1)
    ]
    max_rollbacks: Annotated[int, Rule("times that it goes back to its last checkpoint before it halts", at_least=0)]


@dataclass(frozen=True, kw_only=True)
class Fabric:
    accelerator: Annotated[str, Rule("auto, cpu, or cuda, also called gpu", choices=("auto", "cpu", "cuda", "gpu"))]
    precision: Annotated[str, Rule("of the learner's arithmetic", choices=("32-true", "bf16-mixed"))]
    threads: Annotated[
        int | None, Rule("torch's threads on a CPU; null: all cores but one, which the simulation has", at_least=1)
    ]
    deterministic: Annotated[
        bool, Rule("the same bits in every run on a GPU too, where that costs speed; a CPU gives them anyway")
    ]


@dataclass(frozen=True, kw_only=True)
class Logger:
    tensorboard: Annotated[bool, Rule("write TensorBoard events; metrics.jsonl is always written")]


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration, checked."""

    exp: Annotated[str, Rule("the recipe")]
    profile: Annotated[str, Rule("the machine's profile; auto: gpu where there is one")]
    seed: Annotated[int, Rule("of everything that is random", at_least=0, at_most=2**31 - 1)]
    total_steps: Annotated[int, Rule("policy steps of the whole run", at_least=1, at_most=10**12)]
    learning_starts: Annotated[
        int | None,
        Rule(
            "policy steps before the first gradient step; null: when there is enough to learn from, as for PPO always"
        ),
    ]
    run_dir: Annotated[
        str | None, Rule("where the run is kept; null: logs/<env>[/<id>][/<randomization>]/<agent>/<exp>/seed_<seed>")
    ]
    compile: Annotated[
        str,
        Rule(
            "off: eager; inductor: kernels fused by torch.compile; graph: that, captured as one CUDA graph; "
            "auto: the fastest that the machine can do",
            choices=("auto", "off", "inductor", "graph"),
        ),
    ]
    dry_run: Annotated[bool, Rule("pass through every stage once, in the shortest time")]
    log_every: Annotated[int, Rule("policy steps between two rows of metrics", at_least=1)]
    video_every: Annotated[
        int | None, Rule("policy steps between two videos of the world model; null: none", at_least=1)
    ]
    watchdog: Annotated[
        float | None, Rule("seconds without an iteration before all threads' stacks are printed; null: never", above=0)
    ]
    env: Annotated[Env, Rule("the task and its worlds")]
    randomization: Annotated[
        dict[str, Any],
        Rule("what differs between worlds and episodes, line by line; randomization=none: nothing", open=True),
    ]
    agent: Annotated[Agent, Rule("the algorithm and its numbers")]
    eval: Annotated[Eval, Rule("evaluation in worlds of its own")]
    checkpoint: Annotated[Checkpoint, Rule("checkpoints")]
    faults: Annotated[Faults, Rule("what happens when numbers are no longer finite")]
    fabric: Annotated[Fabric, Rule("device and precision")]
    logger: Annotated[Logger, Rule("where metrics go beside metrics.jsonl")]


class Key(NamedTuple):
    """One key of the configuration: its full dotted path, its type without None, and its rule."""

    path: str
    type: Any
    nullable: bool
    rule: Rule

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def sections(self) -> dict[str, type]:
        """What describes the keys below this one: a class, or one for each value of their key ``name``."""
        if self.type == Agent:
            return AGENTS
        kinds = [kind for kind in (self.type, *get_args(self.type)) if is_dataclass(kind)]
        return {kind_name(kind): kind for kind in kinds}

    @property
    def section(self) -> bool:
        """Whether other keys are below this one."""
        return bool(self.sections) or get_origin(self.type) is dict

    def below(self) -> list[Key]:
        """The keys directly below this one, of all its variants."""
        if self.sections:
            return [key for kind in self.sections.values() for key in keys_of(kind, f"{self.path}.")]
        return [Key(f"{self.path}.{name}", get_args(self.type)[1], False, self.rule) for name in self.rule.names]


def kind_name(cls: type) -> str:
    """The only value that the key ``name`` of a section may have; empty where that does not tell sections apart."""
    rule = next((get_args(hint)[1] for name, hint in _hints(cls).items() if name == "name"), Rule(""))
    return rule.choices[0] if len(rule.choices) == 1 else ""


def keys_of(cls: type, prefix: str = "") -> list[Key]:
    """The keys directly in the section that ``cls`` describes."""
    hints = _hints(cls)
    found = []
    for item in fields(cls):
        hint, rule = get_args(hints[item.name])
        nullable = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
        if nullable:
            kinds = [kind for kind in get_args(hint) if kind is not type(None)]
            hint = functools.reduce(operator.or_, kinds)
        found.append(Key(prefix + item.name, hint, nullable, rule))
    return found


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults that a section has of itself, as plain data; those of built-in ones are in ``configs/``."""
    found: dict[str, Any] = {}
    for item in fields(cls):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if default is not MISSING:
            found[item.name] = asdict(default) if is_dataclass(default) else default
    return found


def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def all_keys(within: list[Key] | None = None) -> Iterator[Key]:
    """Every key of a configuration, sections before what is below them."""
    for item in keys_of(Config) if within is None else within:
        yield item
        if item.section:
            yield from all_keys(item.below())


AGENTS: dict[str, type] = {kind_name(section): section for section in get_args(Agent)}
"""What describes the keys of each agent. One of another package joins when it is chosen."""
