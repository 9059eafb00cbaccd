"""The PPO learner: rollout and its one gradient update.

Sources: Schulman et al. (2017); Huang et al. (2022), "The 37 implementation details of PPO"; the recipes for pixels of
Brax and MuJoCo Playground.

Shape letters: ``N`` worlds, ``B`` minibatch, ``A`` action, ``H W C`` image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import gymnasium
import torch
from torch import Tensor, nn

from sheeplike.agents.agent import Agent, Step, describe_sight
from sheeplike.agents.nonfinite import SkipCounter, health, preserve_state
from sheeplike.agents.ppo.config import PPOConfig
from sheeplike.agents.ppo.losses import COMPUTED, STORED, Totals, compute_advantages, objective, sums, totals_of
from sheeplike.agents.ppo.networks import PPONetworks
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.memory import Rollout
from sheeplike.memory.replay import Spec, load_generator
from sheeplike.nn.compilation import Compilation
from sheeplike.nn.optimizers import adam
from sheeplike.ranks import ALONE, Ranks

# Factor by which adaptive_lr moves the learning rate, and its limits, as in Brax.
LR_FACTOR, LR_RANGE = 1.5, (1e-5, 1e-2)
MEASURABLE_KL = 1e-6  # nats
LEARNING = ("order", "advantage", "target", "mask", "stopped")  # shared by the updates on a rollout
SHIFT = 4  # most pixels by which augmentation moves an image
# The rollout and its batches have these keys, so no observation may.
RESERVED = ("reward", "is_first", "is_last", "is_terminal", "shift", *STORED, *COMPUTED, "envs", "times")


class PPO(Agent):
    """Proximal policy optimisation.

    After ``rollout_length`` steps of every world it makes ``epochs`` passes over them, each in ``minibatches`` parts
    that are drawn without replacement. Arguments are those of :class:`~sheeplike.agents.dreamer_v3.agent.DreamerV3`.

    Raises:
        ValueError: the options do not suit the spaces or the number of worlds.
    """

    networks_class: ClassVar[type[PPONetworks]] = PPONetworks
    world_state = ("shift",)

    def __init__(
        self,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Space,
        config: PPOConfig = PPOConfig(),  # noqa: B008, immutable
        *,
        num_envs: int,
        device: torch.device | str = "cpu",
        compile: str = "off",
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        length, minibatches = config.rollout_length, config.minibatches
        if num_envs * length % minibatches:
            raise ValueError(f"{num_envs} worlds x {length} steps do not divide into {minibatches} minibatches")
        self.config, self.num_envs, self.device, self.autocast = config, num_envs, torch.device(device), autocast
        self.ranks = ranks
        self.networks = self.networks_class(
            observation_space, action_space, config, device=device, autocast=autocast, seed=seed
        )
        self.keys, self.codec = self.networks.keys, self.networks.codec
        self.keys.refuse_names(RESERVED, "something else in the rollout")
        self.augment = config.augment and bool(self.keys.images)
        self.optimizer = adam(self.networks.parameters(), config.learning_rate, eps=config.adam_eps)
        self.rollout = Rollout(
            rollout_spec(self.keys, self.codec, augment=self.augment),
            num_envs=num_envs,
            length=length,
            device=self.device,
            history=config.frame_stack - 1,
        )
        self.generator = torch.Generator(self.device).manual_seed(ranks.seed(seed))
        self.shift = draw_shift(num_envs, len(self.keys.images), self.generator)
        # Shared by the updates on one rollout, and changed in place: a captured update reads these addresses.
        self.advantage, self.target, self.mask = torch.zeros(3, num_envs * length, device=self.device)
        self.stopped = torch.zeros((), device=self.device)
        self.order = torch.arange(num_envs * length, device=self.device)  # the steps as an epoch takes them
        self.sums: Tensor | None = None  # of this epoch's minibatches over all ranks; None: not yet known
        self.updates = 0  # made on the current rollout
        self.unknown = config.frame_stack - 1  # steps to come whose stacked frames the rollout lacks
        self.skips = SkipCounter(self.device)
        self.skipped_in_a_row, self.skipped_total = self.skips.skipped_in_a_row, self.skips.skipped_total
        self._last_batch: dict[str, Tensor] = {}  # the last one of the rollout before
        self._compile(compile)

    def _compile(self, mode: str) -> None:
        """Compile and capture; no other code depends on it."""
        self.compiled = self.networks.compiled = Compilation(mode, self.device)
        self.compiled.methods(self.networks, "forward")
        self.compute_advantages = self.compiled.kernels(compute_advantages)
        self.objective = self.compiled.kernels(objective)
        if self.ranks.size == 1:
            self._learn = self.compiled.step(self._learn)
        else:
            self._differentiate_share = self.compiled.step(self._differentiate_share)
            self._apply_sum = self.compiled.step(self._apply_sum)
        self._prepare = self.compiled.step(self._prepare)

    # --- collecting -------------------------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        """Store one step.

        Where the updates will see other images than the policy saw, log-probability and value are computed anew: with
        augmentation, and after a resume without the rollout, whose older frames only the player still has.
        """
        self.rollout.add(encode_step(step, self.keys) | ({"shift": self.shift} if self.augment else {}))
        if self.augment or self.unknown:
            self._evaluate_newest()
        self.unknown = max(self.unknown - 1, 0)

    @torch.no_grad()
    def _evaluate_newest(self) -> None:
        """Compute log-probability and value of the newest step anew, so that its ratio starts at 1."""
        slot, envs = self.rollout.newest, torch.arange(self.num_envs, device=self.device)
        with self.autocast():
            policy, value = self.networks(observations(self.rollout, self.keys, torch.full_like(envs, slot), envs))
        stored = {name: ring[slot] for name, ring in self.rollout.storage.items()}
        stored["log_prob"].copy_(policy.log_prob(stored["raw_action"]))
        stored["value"].copy_(value)

    def updates_due(self, policy_steps: int) -> int:
        """Return the updates of all epochs if a rollout is complete."""
        return self.config.epochs * self.config.minibatches if self.rollout.full else 0

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, Tensor]:
        """Make one gradient step on a minibatch: static shapes, no host synchronisation.

        ``ppo/skipped`` is 1 if ``early_stop`` or a non-finite number skips it, ``health/skipped_update`` only for the
        latter.
        """
        assert self.rollout.full, "ask updates_due() first"
        if self.updates == 0:
            self._prepare()
        minibatches = self.config.minibatches
        turn = self.updates % minibatches
        if turn == 0:
            self.order.copy_(torch.randperm(self.mask.numel(), generator=self.generator, device=self.device))
            self.sums = None
        self._last_index = self.order.view(minibatches, -1)[turn]
        metrics = self._learn(self._last_index) if self.ranks.size == 1 else self._learn_together(turn)
        self.updates += 1
        if self.updates == self.config.epochs * minibatches:
            self._finish()
        return metrics

    def _prepare(self) -> None:
        """Compute advantages and targets with the values of the networks that acted."""
        seen = (self.rollout.trajectory(name) for name in ("reward", "value", "is_last", "is_terminal"))
        options = {name: getattr(self.config, name) for name in ("reward_scaling", "discount", "gae_lambda")}
        computed = self.compute_advantages(*seen, **options)
        for name, value in zip(COMPUTED, computed, strict=True):
            getattr(self, name).copy_(value.flatten())
        self.stopped.zero_()

    def _finish(self) -> None:
        self._last_batch = self.last_batch()
        # Not before, or the ratio would compare probabilities under two different normalisations.
        steps = {key: self.rollout.trajectory(key)[:-1].flatten(0, 1) for key in self.keys.vectors}
        self.networks.update_norms(steps, self.ranks)
        self.rollout.restart()
        # Both rollouts share the newest step; its action was chosen before the updates, and stays.
        self._evaluate_newest()
        self.shift = draw_shift(self.num_envs, len(self.keys.images), self.generator)
        self.updates = 0

    def _learn(self, index: Tensor) -> dict[str, Tensor]:
        """Learn from the steps ``index (B,)`` of the flattened rollout."""
        losses, metrics = self._differentiate(index)
        return self._apply(losses, metrics)

    def _differentiate(
        self, index: Tensor, totals: Totals | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compute gradients; return losses and metrics."""
        losses, metrics = self.losses(self.minibatch(index), *(() if totals is None else (totals,)))
        total = self.total(losses)
        self.optimizer.zero_grad()
        total.backward()
        return {name: loss.detach() for name, loss in (losses | {"total": total}).items()}, metrics

    def _apply(self, losses: dict[str, Tensor], metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make the step that the gradients ask for, or skip it; return all metrics."""
        norm = nn.utils.clip_grad_norm_(self.networks.parameters(), self.config.max_grad_norm)
        finite = losses["total"].isfinite() & norm.isfinite()
        skip = self.skips.count(finite)
        rate, kl = self.optimizer.param_groups[0]["lr"], metrics["ppo/approx_kl"]
        control_kl(self.config.kl_control, kl, self.config.kl_target, finite=finite, stopped=self.stopped, rate=rate)
        # Adam's way to skip a step without the host, made for gradients that overflowed.
        self.optimizer.found_inf = torch.maximum(self.stopped, skip)
        self.optimizer.step()
        metrics |= {f"loss/{name}": loss for name, loss in losses.items()} | health(losses["total"], skip)
        metrics |= {"grad_norm/total": norm, "opt/learning_rate": self.optimizer.learning_rate()}
        return metrics | {"ppo/skipped": self.optimizer.found_inf}

    def _learn_together(self, turn: int, *, exchange: bool = True) -> dict[str, Tensor]:
        """Make the step that one rank would make with the minibatches of all: a collective of sums.

        Moments of advantages and valid steps are known at the beginning of an epoch, and summed there for all of its
        minibatches. Without ``exchange`` nothing is summed.
        """
        index = self.order.view(self.config.minibatches, -1)
        if self.sums is None or not exchange:
            own = sums(*(getattr(self, name)[index] for name in COMPUTED))
            self.sums = self.ranks.sum(own) if exchange else own
        flat = self._differentiate_share(index[turn], self.sums[turn])
        return self._apply_sum(self.ranks.sum(flat) if exchange else flat, self.sums[turn])

    def _differentiate_share(self, index: Tensor, row: Tensor) -> Tensor:
        """Return what all ranks add up: gradients, losses and metrics."""
        losses, metrics = self._differentiate(index, totals_of(row, self.mask.dtype))
        metrics["ppo/valid_fraction"] = metrics["ppo/valid_fraction"] / self.ranks.size
        self._names = list(losses), list(metrics)
        self._shared = [p for p in self.networks.parameters() if p.grad is not None]
        gradients = (p.grad.flatten() for p in self._shared)
        return torch.cat([*gradients, torch.stack([*losses.values(), *metrics.values()])])

    def _apply_sum(self, flat: Tensor, row: Tensor) -> dict[str, Tensor]:
        """Make the step from the sum of all ranks' ``flat``."""
        names, metric_names = self._names
        *gradients, values = flat.split([*(p.numel() for p in self._shared), len(names) + len(metric_names)])
        for p, gradient in zip(self._shared, gradients, strict=True):
            p.grad = gradient.view_as(p)
        values = values.clone().unbind()
        losses, metrics = (
            dict(zip(names, values, strict=False)),
            dict(zip(metric_names, values[len(names) :], strict=True)),
        )
        unexplained = metrics.pop("error/2") - metrics.pop("error/1").square()
        spread = totals_of(row, flat.dtype).target_variance.clamp_min(1e-8)
        return self._apply(losses, metrics | {"critic/explained_variance": 1 - unexplained / spread})

    def losses(
        self, data: Mapping[str, Tensor], totals: Totals | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return losses and metrics of a :meth:`minibatch`, 0-dim each, over the steps where ``mask`` is 1."""
        with self.autocast():
            policy, value = self.networks({key: data[key] for key in self.keys.spaces})
        options = {name: getattr(self.config, name) for name in ("clip", "value_clip", "normalise_advantage")}
        return self.objective(policy, value, *(data[key] for key in (*STORED, *COMPUTED)), **options, totals=totals)

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        value_scale, entropy_scale = self.config.value_scale, self.config.entropy_scale
        return losses["policy"] + value_scale * losses["value"] - entropy_scale * losses["entropy"]

    def minibatch(self, index: Tensor) -> dict[str, Tensor]:
        """Return the steps ``index (B,)`` of the flattened rollout: observations and inputs of :func:`objective`."""
        slot, env = index // self.num_envs + self.rollout.history, index % self.num_envs
        obs = observations(self.rollout, self.keys, slot, env)
        stored = {key: self.rollout.storage[key][slot, env] for key in STORED}
        return {**obs, **stored, **{key: getattr(self, key)[index] for key in COMPUTED}}

    # --- reports ----------------------------------------------------------------------------------------------------

    def last_batch(self) -> dict[str, Tensor]:
        """Return the last :meth:`minibatch`, with world and time of each step, ``envs`` and ``times`` ``(B,)``."""
        if not self.updates:
            return self._last_batch
        steps = {"envs": self._last_index % self.num_envs, "times": self._last_index // self.num_envs}
        return self.minibatch(self._last_index) | steps

    def describe(self) -> dict[str, str]:
        config, num_envs = self.config, self.num_envs * self.ranks.size
        steps = config.rollout_length * num_envs
        frames = f"{config.frame_stack} stacked frames" if config.frame_stack > 1 else "single frames"
        cnn = f", {config.vision.layout} network on {frames}" if self.keys.images else ""
        return {
            "sees": describe_sight(self.networks.space, self.keys.spaces),
            "agent": f"{config.name}{cnn}: {sum(p.numel() for p in self.networks.parameters()):,} parameters",
            "one iteration": f"{num_envs} policy steps",
            "learning": f"every {config.rollout_length} iterations: {config.epochs} epochs of {config.minibatches} "
            f"minibatches of {steps // config.minibatches:,} steps",
            "memory": f"rollout of {steps:,} policy steps",
        }

    def warm_up(self) -> None:
        index = torch.zeros(self.mask.numel() // self.config.minibatches, dtype=torch.int64, device=self.device)
        before = {name: getattr(self, name).clone() for name in LEARNING}  # a run may go on between two updates
        with preserve_state(self.networks, self.optimizer, self.skips, self.device):
            self.compiled.warm_up(self._prepare)
            # Ranks may need different numbers of calls, so they exchange nothing here.
            alone = self.ranks.size == 1
            self.compiled.warm_up(lambda: self._learn(index) if alone else self._learn_together(0, exchange=False))
        self.sums = None
        for name, value in before.items():
            getattr(self, name).copy_(value)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self, *, replay: bool = True, history: bool = True) -> dict[str, Any]:
        state = {
            "modules": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "shift": self.shift,
        } | self.skips.state_dict()
        if not replay:
            return state
        learning = {"updates": self.updates}
        if self.updates:  # a stop came between two updates on a rollout
            learning |= {name: getattr(self, name) for name in LEARNING}
        return state | {"rollout": self.rollout.state_dict(), "learning": learning}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.networks.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        load_generator(self.generator, state["generator"])
        self.shift = torch.empty_like(self.shift).copy_(state["shift"])
        self.skips.load_state_dict(state)
        if "rollout" in state:
            self.rollout.load_state_dict(state["rollout"])
            self.updates = int(state["learning"]["updates"])
            if self.updates:
                if not self.rollout.full or self.updates not in range(self.config.epochs * self.config.minibatches):
                    raise ValueError(f"{self.updates} updates after {self.rollout.steps} steps of a rollout")
                for name in LEARNING:
                    getattr(self, name).copy_(state["learning"][name])
                if not torch.equal(self.order.sort().values, torch.arange(len(self.order), device=self.device)):
                    raise ValueError("order is no permutation of the rollout's steps")
                turn = (self.updates - 1) % self.config.minibatches
                self._last_index = self.order.view(self.config.minibatches, -1)[turn]
        self.unknown = 0 if "rollout" in state else self.config.frame_stack - 1


def rollout_spec(keys: ObservationKeys, codec: ActionCodec, *, augment: bool = False) -> Spec:
    """Return shape and dtype of each key of one step of one world."""
    flags = {name: ((), torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    numbers = {name: ((), torch.float32) for name in ("reward", "log_prob", "value")}
    shift = {"shift": ((len(keys.images), 2), torch.int8)} if augment else {}
    return {**keys.stored(), **flags, **numbers, "raw_action": ((codec.width,), torch.float32), **shift}


def encode_step(step: Step, keys: ObservationKeys) -> dict[str, Tensor]:
    """Return a step as the rollout takes it, without shifts."""
    flags = {"is_first": step.is_first, "is_last": step.is_last, "is_terminal": step.is_terminal}
    return {**{key: step.obs[key] for key in keys.spaces}, **flags, "reward": step.reward, **step.extras}


def draw_shift(num_envs: int, cameras: int, generator: torch.Generator) -> Tensor:
    """Draw one shift for each world's next trajectory and camera: ``(N, cameras, 2)`` int8."""
    shift = torch.randint(-SHIFT, SHIFT + 1, (num_envs, cameras, 2), generator=generator, device=generator.device)
    return shift.to(torch.int8)


def observations(rollout: Rollout, keys: ObservationKeys, slot: Tensor, env: Tensor) -> dict[str, Tensor]:
    """Return inputs of the networks at steps ``(B,)``: images stacked and, if augmented, moved; vectors."""
    shift = rollout.storage["shift"][slot, env].long() if "shift" in rollout.storage else None
    images = {
        key: rollout.stack(key, slot, env, None if shift is None else shift[:, camera])
        for camera, key in enumerate(keys.images)
    }
    return images | {key: rollout.storage[key][slot, env] for key in keys.vectors}


def control_kl(kind: str, kl: Tensor, target: float, *, finite: Tensor, stopped: Tensor, rate: Tensor) -> None:
    """React to the KL divergence of an update, in nats; all tensors are 0-dim on the device.

    Args:
        kind: the option ``kl_control``.
        finite: bool; a non-finite update changes nothing.
        stopped: float32; ``early_stop`` makes it 1 beyond 1.5 times the target.
        rate: the learning rate; ``adaptive_lr`` lowers it beyond twice the target and raises it below half of it.
    """
    if kind == "early_stop":
        stopped.copy_(torch.maximum(stopped, ((kl > 1.5 * target) & finite).float()))
    elif kind == "adaptive_lr":
        factor = torch.where(kl > 2 * target, 1 / LR_FACTOR, 1.0)
        # At a rollout's first update the policy is still the one that acted, and its KL divergence is rounding alone.
        factor = torch.where((kl < target / 2) & (kl > MEASURABLE_KL), LR_FACTOR, factor)
        rate.copy_(torch.where(finite, (rate * factor).clamp(*LR_RANGE), rate))
