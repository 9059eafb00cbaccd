"""What the commands ask about an agent, beside the agent itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sheeplike.commands.schema import Config, kind_name

if TYPE_CHECKING:
    import torch
    from gymnasium import spaces

    from sheeplike.agents.agent import Agent

HALVINGS = 8  # at most, of a setting that is proposed

Choices = Iterator[tuple[str, Mapping[str, object]]]
"""Smaller values of one setting, from large to small: as typed, and as data."""


class Setup(NamedTuple):
    """What an agent is built for.

    Attributes:
        num_envs: worlds that it learns in.
        device: where it learns.
        autocast: makes the context of mixed precision.
        compile: as in the configuration; see :class:`sheeplike.nn.compilation.Compilation`.
        seed: of everything that is random in it.
        learning_starts: policy steps before the first update, or None, as in the checked configuration.
    """

    num_envs: int
    device: torch.device
    autocast: Callable[[], AbstractContextManager]
    compile: str
    seed: int
    learning_starts: int | None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a run is expected to take; what the networks compute on the way is an estimate, the rest is exact.

    Attributes:
        learner: parameters, their gradients and the optimizer's two moments.
        memory: the replay or the rollout.
        batch: the frames of one gradient step, and what is kept of them for the gradient.
        worlds: the frames of all worlds; their physics comes on top.
        saved: what a checkpoint holds of the learner.
        renewed: what it holds of the memory and cannot share with the checkpoint before.
    """

    learner: int = 0
    memory: int = 0
    batch: int = 0
    worlds: int = 0
    saved: int = 0
    renewed: int = 0

    @property
    def total(self) -> int:
        return self.learner + self.memory + self.batch + self.worlds


class Benchmark(NamedTuple):
    """How ``bench`` measures an agent.

    Attributes:
        smallest: the configuration of the same updates on the smallest memory.
        cycle: updates that are made before anything can be remembered again.
        period: iterations after which acting and learning begin anew.
        update: what one update is; images and precision follow.
        growth: overrides under which an update becomes smaller or larger.
    """

    smallest: Config
    cycle: int = 1
    period: int = 1
    update: str = "One gradient step"
    growth: tuple[str, ...] = ()


class AgentKind:
    """An agent as the commands know it: its keys, how it is built, what is told about it.

    A subclass has a :attr:`section` and a :meth:`build`; the rest only makes messages and estimates better. Another
    package announces its subclass as an entry point of ``sheeplike.agents``, under the agent's name.

    Kinds are imported whenever a configuration is checked: what takes long to import, such as torch, is best imported
    in the methods.

    Attributes:
        section: a frozen dataclass, each field ``key: Annotated[type, Rule(...)]``, its defaults those of the keys. One
            of them is ``name``, whose only choice is the agent's name.
        dry_run: overrides that make a run short, such as ``agent.batch_size=4``.
        collecting: what a run does until the agent learns for the first time.
    """

    section: ClassVar[type]
    dry_run: ClassVar[tuple[str, ...]] = ()
    collecting: ClassVar[str] = "collecting"

    @property
    def name(self) -> str:
        return kind_name(self.section)

    def build(self, section: Any, space: spaces.Dict, actions: spaces.Space, setup: Setup) -> Agent:
        """The agent.

        Args:
            section: :attr:`section` with the values of the configuration.
            space, actions: of one world.

        Raises:
            ValueError, TypeError: it cannot learn with these numbers, or in these worlds; in one line.
            MemoryError: it does not fit.
        """
        raise NotImplementedError(f"{type(self).__name__}.build")

    def check(self, config: Config) -> Config:
        """The configuration, with values that follow from others filled in.

        Raises:
            InvalidValue: the agent's numbers do not go with each other, or with the rest.
        """
        return config

    def acting(self, section: Any, num_envs: int) -> Any:
        """The section of an agent that only acts: what it remembers is as small as can be."""
        return section

    # --- when it learns ---------------------------------------------------------------------------------------------

    def learning_begins(self, config: Config) -> int:
        """Policy steps before which no update is due; some have been made before it is compiled."""
        return max(config.learning_starts or 0, config.env.num_envs)

    def gradient_steps(self, config: Config, begun: int) -> int | None:
        """Gradient steps from policy step ``begun`` to the end of the run, or None where that is not known."""
        return None

    # --- what is told about it --------------------------------------------------------------------------------------

    def describe(self, config: Config, agent: Agent) -> dict[str, str]:
        """What the agent is and how it learns, name to text."""
        modules = getattr(agent, "modules", None)
        count = f": {sum(p.numel() for p in modules.parameters()):,} parameters" if modules is not None else ""
        return {"agent": f"{config.agent.name}{count}", "one iteration": f"{config.env.num_envs} policy steps"}

    def remembered(self, config: Config, num_envs: int) -> tuple[str, int]:
        """What its memory is called, and how many policy steps it holds; 0 where that is not known."""
        return "memory", 0

    def benchmark(self, config: Config, sizes: Sequence[str] = ()) -> Benchmark:
        """How it is measured; ``sizes`` are the names of the presets, from small to large."""
        return Benchmark(config)

    # --- what it takes ----------------------------------------------------------------------------------------------

    def estimate(self, config: Config, space: spaces.Dict, actions: spaces.Space) -> MemoryEstimate:
        """What it takes; all 0 where that is not known. ``worlds`` is filled in by the caller."""
        return MemoryEstimate()

    def in_words(self, config: Config) -> tuple[str, str]:
        """The memory and the batch of :meth:`estimate`, such as ``the rollout`` and ``a batch of 16 sequences``."""
        return "what it remembers", "a batch"

    def smaller(self, config: Config) -> Iterator[Choices]:
        """Smaller values of each setting that takes memory."""
        yield from ()

    def smaller_on_disk(self, config: Config) -> Iterator[Choices]:
        """Smaller values of each setting by which checkpoints become smaller."""
        yield from ()


def halved(key: str, value: int) -> Choices:
    """Half of a value, and a quarter, and so on."""
    for n in range(1, HALVINGS + 1):
        if value >> n:
            yield f"{key}={value >> n}", {key: value >> n}


def around(count: int, factor: int) -> list[int]:
    """Fewer, as many and more."""
    return sorted({max(count // factor, 1), count, count * factor})


def arguments(section: Any, **replaced: Any) -> dict[str, Any]:
    """The keys of a section as keyword arguments, sections within it replaced by what they describe."""
    names = [name for name in section.__dataclass_fields__ if name != "name"]
    return {name: getattr(section, name) for name in names} | replaced
