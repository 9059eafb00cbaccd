"""The PPO agent: its player, its rollout and its one gradient update.

Sources: Schulman et al. (2017); Huang et al. (2022), "The 37 implementation details of PPO"; the recipes for pixels of
Brax and MuJoCo Playground.

Shape letters: ``N`` worlds, ``T`` steps of a trajectory, ``B`` minibatch, ``A`` action, ``H W C`` image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from sheeplike.agents.agent import Prediction, Step, own_randomness
from sheeplike.agents.faults import Faults, health
from sheeplike.agents.ppo import inspection
from sheeplike.agents.ppo.experience import STORED, draw_shift, observations, rollout_spec, to_store
from sheeplike.agents.ppo.kl_control import KL_CONTROLS, control_kl
from sheeplike.agents.ppo.losses import JUDGED, judge, objective
from sheeplike.agents.ppo.networks import ActorCritic, Vision
from sheeplike.agents.ppo.player import PPOPlayer
from sheeplike.agents.rehearsal import rehearsal
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.memory import Rollout
from sheeplike.memory.replay import load_generator
from sheeplike.nn.compilation import Compilation
from sheeplike.nn.optimizers import adam, load_in_place


class PPO:
    """Proximal policy optimisation, a :class:`sheeplike.agents.agent.Agent`.

    When every world has taken ``rollout_length`` steps, ``epochs`` passes are made over them, each in ``minibatches``
    parts drawn without replacement.

    Args:
        observation_space, action_space: of one world.
        num_envs: training worlds ``N``.
        device: where networks and rollout live.
        observations: glob patterns of what the policy sees: pixels, vectors or both.
        value_observations: of what the value sees, which may be more, such as ``privileged_state``; None: the same.
        frame_stack: frames that an image consists of. The policy has no memory: from one frame nothing moves.
        vision, activation, policy_layers, value_layers, shared_trunk, distribution: of the networks.
        augment: move all images of a camera in one trajectory by a random few pixels.
        rollout_length: steps of every world between two updates.
        minibatches, epochs: gradient steps per pass, and passes.
        discount, gae_lambda: of future rewards, and of longer advantage estimates.
        reward_scaling: factor of all rewards.
        learning_rate: of Adam.
        clip: how far the ratio of probabilities may leave 1.
        value_clip: how far a value may move, or None.
        value_scale, entropy_scale: weights of the losses.
        normalise_advantage: per minibatch.
        max_grad_norm: of all gradients together.
        kl_control: what holds the policy within ``kl_target`` nats of the one that acted: ``none``; ``early_stop``
            (beyond 1.5 times as much, the rest of the updates on this rollout changes nothing); or ``adaptive_lr`` (a
            smaller learning rate beyond twice as much, a larger one below half of it).
        compile: how updates and acting are made fast; see :class:`~sheeplike.nn.compilation.Compilation`.
        autocast: context of the networks' arithmetic.
        seed: of the parameters and of minibatches and shifts.

    Raises:
        ValueError: settings that do not go together.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Space,
        *,
        num_envs: int,
        device: torch.device | str = "cpu",
        observations: Sequence[str] = ("pixels/*",),
        value_observations: Sequence[str] | None = None,
        frame_stack: int = 1,
        vision: Vision = Vision(),  # noqa: B008, immutable
        activation: str = "elu",
        policy_layers: Sequence[int] = (128, 64),
        value_layers: Sequence[int] = (128, 64),
        shared_trunk: bool = False,
        distribution: str = "auto",
        augment: bool = False,
        rollout_length: int = 20,
        minibatches: int = 8,
        epochs: int = 8,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        reward_scaling: float = 1.0,
        learning_rate: float = 1e-3,
        clip: float = 0.3,
        value_clip: float | None = None,
        value_scale: float = 0.5,
        entropy_scale: float = 0.01,
        normalise_advantage: bool = True,
        max_grad_norm: float = 1.0,
        kl_control: str = "none",
        kl_target: float = 0.01,
        compile: str = "off",
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        seed: int = 0,
    ) -> None:
        if num_envs * rollout_length % minibatches:
            raise ValueError(f"{num_envs} worlds x {rollout_length} steps do not divide into {minibatches} minibatches")
        if kl_control not in KL_CONTROLS:
            raise ValueError(f"kl_control {kl_control!r}: expected one of {', '.join(KL_CONTROLS)}")
        self.device = torch.device(device)
        self.num_envs, self.rollout_length = num_envs, rollout_length
        self.frame_stack, self.autocast = frame_stack, autocast
        self.minibatches, self.epochs = minibatches, epochs
        self.discount, self.gae_lambda, self.reward_scaling = discount, gae_lambda, reward_scaling
        self.clip, self.value_clip = clip, value_clip
        self.value_scale, self.entropy_scale = value_scale, entropy_scale
        self.normalise_advantage, self.max_grad_norm = normalise_advantage, max_grad_norm
        self.kl_control, self.kl_target = kl_control, kl_target
        self.policy_keys = ObservationKeys(observation_space, observations)
        value_keys = ObservationKeys(observation_space, value_observations or observations)
        self.keys = ObservationKeys(observation_space, sorted({*self.policy_keys.spaces, *value_keys.spaces}))
        self.keys.refuse_names(STORED, "something else in the rollout")
        self.augment = augment and bool(self.keys.images)
        self.codec = ActionCodec(action_space)
        with own_randomness(self.device):
            torch.manual_seed(seed)
            self.networks = ActorCritic(
                self.policy_keys,
                value_keys,
                self.codec,
                distribution=distribution,
                policy_layers=policy_layers,
                value_layers=value_layers,
                shared_trunk=shared_trunk,
                stack=frame_stack,
                vision=vision,
                activation=activation,
            ).to(self.device)
        self.optimizer = adam(self.networks.parameters(), learning_rate, eps=1e-5)
        self.rollout = Rollout(
            rollout_spec(self.keys, self.codec, augment=self.augment),
            num_envs=num_envs,
            length=rollout_length,
            device=self.device,
            history=frame_stack - 1,
        )
        self.seed, self.generator = seed, torch.Generator(self.device)
        # What the updates on one rollout share. It stays where it is: a captured update reads it there.
        self.advantage, self.target, self.valid = torch.zeros(3, num_envs * rollout_length, device=self.device)
        self.stopped = torch.zeros((), device=self.device)
        none = torch.zeros(num_envs * rollout_length // minibatches, dtype=torch.int64, device=self.device)
        self.faults = Faults(self.device, index=none)
        self.skipped_in_a_row, self.skipped_total = self.faults.skipped_in_a_row, self.faults.skipped_total
        self.forget()
        self._compile(compile)

    def _compile(self, mode: str) -> None:
        """What is compiled and captured; everything else is written as if it were not."""
        self.compiled = Compilation(mode, self.device)
        self.compiled.methods(self.networks, "forward")
        self.judge, self.objective = self.compiled.kernels(judge), self.compiled.kernels(objective)
        self._learn = self.compiled.step(self._learn)
        self._prepare = self.compiled.step(self._prepare)

    # --- acting and remembering -------------------------------------------------------------------------------------

    def player(self, num_envs: int) -> PPOPlayer:
        """A fresh player for ``num_envs`` worlds; it shares this agent's parameters and nothing else."""
        return PPOPlayer(self, num_envs)

    @torch.no_grad()
    def act(self, seen: Mapping[str, Tensor], *, sample: bool) -> tuple[dict[str, Tensor], Tensor]:
        """What the policy does when it sees ``(N, ...)``: what a player's extras hold, and the action.

        Where ``seen`` is without what only the value sees, the extras are without a value.
        """
        with self.autocast():
            judged = seen.keys() == self.keys.spaces.keys()
            policy, value = self.networks(seen) if judged else (self.networks.act(seen), None)
        drawn = policy.sample() if sample else policy.mode()
        extras = {"drawn": drawn, "log_prob": policy.log_prob(drawn)} | ({"value": value} if judged else {})
        return extras, self.networks.to_env(drawn)

    def remember(self, step: Step) -> None:
        """Store one step of all worlds, with what the policy drew, its log-probability and the value.

        Where the updates will see other images, log-probability and value are taken anew, on those: a ratio that starts
        at 1 compares like with like. So it is with augmentation, and where a rollout begins in the middle of an episode
        whose older frames only the player knows, after a resume without the rollout.
        """
        self.rollout.add(to_store(step, self.keys) | ({"shift": self.shift} if self.augment else {}))
        if self.augment or self.unknown:
            slot, worlds = self.rollout.newest, torch.arange(self.num_envs, device=self.device)
            seen = observations(self.rollout, self.keys, torch.full_like(worlds, slot), worlds)
            with torch.no_grad(), self.autocast():
                policy, value = self.networks(seen)
            self.rollout.storage["log_prob"][slot] = policy.log_prob(step.extras["drawn"])
            self.rollout.storage["value"][slot] = value
        self.unknown = max(self.unknown - 1, 0)

    def forget(self) -> None:
        """What was seen is gone, as in a new agent; a rollout begins, in the middle of an episode for all it knows."""
        self.rollout.forget()
        self.updates = 0  # of the current rollout
        self.unknown = self.frame_stack - 1  # coming steps whose stacks may reach back beyond what the rollout holds
        for kept in (self.advantage, self.target, self.valid, self.stopped):
            kept.zero_()
        self.faults.forget()
        self.offending: dict[str, Tensor] = {}  # what is kept of an earlier rollout
        self.generator.manual_seed(self.seed)
        self.shift = draw_shift(self.num_envs, len(self.keys.images), self.generator)

    def updates_due(self, policy_steps: int) -> int:
        """All epochs of a rollout when it is complete, else none."""
        return self.epochs * self.minibatches if self.rollout.full else 0

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, Tensor]:
        """One gradient step on one minibatch of the complete rollout; the last one makes room for the next rollout.

        Static shapes, no host synchronisation. Returns 0-dim device tensors. Where a loss or a gradient is not finite,
        nothing changes but ``skipped_in_a_row`` and what is drawn next. A step that ``early_stop`` skips is no such
        update: ``ppo/skipped`` counts both, ``health/skipped_update`` these.

        Raises:
            RuntimeError: the rollout is not complete.
        """
        if not self.rollout.full:
            raise RuntimeError("update() before the rollout is complete: ask updates_due() first")
        if self.updates == 0:
            self._prepare()
        turn = self.updates % self.minibatches
        if turn == 0:
            self.order = torch.randperm(self.valid.numel(), generator=self.generator, device=self.device)
        metrics = self._learn(self.order.view(self.minibatches, -1)[turn])
        self.updates += 1
        if self.updates == self.epochs * self.minibatches:
            self._finish()
        return metrics

    def _prepare(self) -> None:
        """Judge the actions of the rollout, with the values that were current when they were chosen."""
        seen = (self.rollout.trajectory(name) for name in ("reward", "value", "is_last", "is_terminal"))
        judged = self.judge(*seen, reward_scaling=self.reward_scaling, discount=self.discount, lam=self.gae_lambda)
        for kept, value in zip((self.advantage, self.target, self.valid), judged, strict=True):
            kept.copy_(value.flatten())
        self.stopped.zero_()

    def _finish(self) -> None:
        self.offending = inspection.keep_offending(self)
        # Only now, or the ratio would compare actions chosen under two different normalisations.
        steps = {key: self.rollout.trajectory(key)[:-1].flatten(0, 1) for key in self.keys.vectors}
        self.networks.update_norms(steps)
        self.rollout.restart()
        self.shift = draw_shift(self.num_envs, len(self.keys.images), self.generator)
        self.updates = 0

    def _learn(self, index: Tensor) -> dict[str, Tensor]:
        """One gradient step on the steps ``index (B,)`` of the flattened rollout."""
        data = self.minibatch(index)
        losses, metrics = self.losses(data, *(data[key] for key in JUDGED))
        total = self.total(losses)
        self.optimizer.zero_grad(set_to_none=False)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.networks.parameters(), self.max_grad_norm)
        losses = {name: loss.detach() for name, loss in (losses | {"total": total}).items()}
        finite = losses["total"].isfinite() & norm.isfinite()
        skip = self.faults.count(finite, index=index)
        rate, kl = self.optimizer.param_groups[0]["lr"], metrics["ppo/approx_kl"]
        control_kl(self.kl_control, kl, self.kl_target, finite=finite, stopped=self.stopped, rate=rate)
        # Adam's way to skip a step without the host, made for gradients that overflowed.
        self.optimizer.found_inf = torch.maximum(self.stopped, skip)
        self.optimizer.step()
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | health(losses["total"], skip)
        metrics |= {"grad_norm/total": norm, "opt/learning_rate": self.learning_rate}
        return metrics | {"ppo/skipped": self.optimizer.found_inf}

    def losses(self, obs: Mapping[str, Tensor], *judged: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses and metrics of ``B`` steps, 0-dim each, over those where ``valid (B,)`` is 1.

        Args:
            obs: what the networks see.
            judged: :data:`JUDGED`.
        """
        with self.autocast():
            policy, value = self.networks({key: obs[key] for key in self.keys.spaces})
        options = {"clip": self.clip, "value_clip": self.value_clip, "normalise_advantage": self.normalise_advantage}
        return self.objective(policy, value, *judged, **options)

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """What is minimised."""
        return losses["policy"] + self.value_scale * losses["value"] - self.entropy_scale * losses["entropy"]

    @property
    def learning_rate(self) -> Tensor:
        """The learning rate, a 0-dim device tensor."""
        return self.optimizer.param_groups[0]["lr"].clone()

    def minibatch(self, index: Tensor) -> dict[str, Tensor]:
        """The steps ``index (B,)`` of the flattened rollout: what the networks see of them, and :data:`JUDGED`."""
        slot, world = index // self.num_envs + self.rollout.history, index % self.num_envs
        obs = observations(self.rollout, self.keys, slot, world)
        stored = {key: self.rollout.storage[key][slot, world] for key in JUDGED[:3]}
        return {**obs, **stored, **{key: getattr(self, key)[index] for key in JUDGED[3:]}}

    # --- what the loop asks beside that -----------------------------------------------------------------------------

    def report(self) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
        """Nothing: there is no model whose predictions could be shown."""
        return {}, {}

    def counters(self, policy_steps: int, gradient_steps: int) -> dict[str, float]:
        """Nothing that the host knows alone."""
        return {}

    def offending_batch(self) -> dict[str, Tensor]:
        """See :func:`sheeplike.agents.ppo.inspection.offending_batch`."""
        return inspection.offending_batch(self)

    def examine(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :func:`sheeplike.agents.ppo.inspection.examine`."""
        return inspection.examine(self, batch)

    def warm_up(self) -> float:
        """Compile the update and time it on what the rollout holds, in seconds; nothing of the agent changes."""
        index = torch.zeros_like(self.faults.first["index"])
        with rehearsal(self.networks, self.optimizer, self.faults, self.device):
            self.compiled.warm_up(self._prepare)
            return self.compiled.warm_up(lambda: self._learn(index))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def history(self) -> None:
        """None: a rollout is small, and part of the state."""

    def state_dict(self, *, replay: bool = True, history: bool = True) -> dict[str, Any]:
        """Everything that a continuation needs; without ``replay`` a new rollout begins.

        Raises:
            RuntimeError: in the middle of a rollout's updates, whose order and advantages are not part of it.
        """
        if self.updates:
            raise RuntimeError(f"state_dict() after {self.updates} of a rollout's updates: make all that are due first")
        state = {
            "modules": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "shift": self.shift,
        } | self.faults.state_dict()
        return state | ({"rollout": self.rollout.state_dict()} if replay else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.networks.load_state_dict(state["modules"])
        load_in_place(self.optimizer, self.optimizer.load_state_dict, state["optimizer"])
        load_generator(self.generator, state["generator"])
        self.shift = state["shift"].to(self.device)
        self.faults.load_state_dict(state)
        self.offending = {}
        if "rollout" in state:
            self.rollout.load_state_dict(state["rollout"])
        self.unknown = 0 if "rollout" in state else self.frame_stack - 1
