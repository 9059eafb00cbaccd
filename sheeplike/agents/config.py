"""Options that every agent has, and numbers that a run needs before the agent exists."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from sheeplike.options import CONDITION, InvalidOption, Options


class AgentConfig(Options):
    """Options of an agent; a subclass adds its own, each written once, and narrows ``name`` to a ``Literal``.

    Class attributes:
        dry_run: options that make a run pass through every stage in the shortest time.
        collecting: stage of the progress line before the agent first learns.
        memory_options: options whose smaller values take less memory, the most effective first.
        has_world_model: ``analyze`` and ``dream`` can inspect this agent.
        has_replay: the agent can learn from recorded episodes, and takes a ``directory`` for files while it learns.
    """

    name: str
    observations: Annotated[tuple[str, ...], CONDITION] = Field(
        ("pixels/*",), min_length=1, description="glob patterns of the observations that the agent sees"
    )

    dry_run: ClassVar[dict[str, Any]] = {}
    collecting: ClassVar[str] = "collecting"
    memory_options: ClassVar[tuple[str, ...]] = ()
    has_world_model: ClassVar[bool] = False
    has_replay: ClassVar[bool] = False

    def check(self, *, num_envs: int, total_steps: int) -> Self:
        """Check the options against the run, and fill in those that follow from it.

        Raises:
            InvalidOption: an option does not suit the run; the key is a full path, such as ``agent.batch_length``.
        """
        return self

    def divide(self, ranks: int, num_envs: int) -> Self:
        """Return the options of one of several ranks, which has ``num_envs`` of the worlds.

        Raises:
            InvalidOption: an option cannot be divided, or the agent learns on one device only.
        """
        raise InvalidOption("fabric.devices", ranks, f"1, since {self.name} learns on one device", 1)

    def multiply(self, ranks: int) -> Self:
        """Return the options of all ranks together, if each does what these ask of one."""
        return self

    def first_update(self, num_envs: int) -> int:
        """Return the policy steps of a new run after which the first update can come."""
        return num_envs

    def updates(self, start: int, stop: int, num_envs: int) -> int | None:
        """Return the gradient steps between two policy steps of a run; None: unknown."""
        return None
