"""The DreamerV3 agent: its player, its memory and its one gradient update.

Source: DreamerV3 (Hafner et al., Nature 2025, arXiv 2301.04104v2) as implemented today by ``danijar/dreamerv3``.

Shape letters: ``N`` worlds, ``B`` batch, ``T`` sequence, ``I`` imagined steps, ``A`` action, ``D`` deter,
``S K`` stoch groups x classes, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from sheeplike.agents.agent import Prediction, Ratio, Step, own_randomness
from sheeplike.agents.dreamer_v3 import inspection
from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic, imagination_loss, replay_value_loss
from sheeplike.agents.dreamer_v3.experience import compact, expand, replay_spec, to_store
from sheeplike.agents.dreamer_v3.observations import ModelKeys
from sheeplike.agents.dreamer_v3.player import DreamerPlayer
from sheeplike.agents.dreamer_v3.report import open_loop
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.sizes import SIZES, Size
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.agents.faults import Faults, health
from sheeplike.agents.rehearsal import rehearsal
from sheeplike.agents.spaces import ActionCodec
from sheeplike.memory import SequenceReplay
from sheeplike.nn.compilation import Compilation
from sheeplike.nn.optimizers import LaProp, update_slow

CONTEXT = 1  # stored steps before each trained sequence; the last one supplies the latent to start from
LATENTS = ("deter", "stoch")  # stored with every step, and refreshed by every update
LOSS_SCALES = {"reconstruction": 1.0, "reward": 1.0, "continue": 1.0, "dyn": 1.0, "rep": 0.1} | {
    "policy": 1.0,
    "value": 1.0,
    "replay_value": 0.3,
}


class DreamerV3:
    """Learns a world model from replayed sequences, and behaviour inside it.

    Args:
        observation_space: of one world, a flat ``Dict``.
        action_space: of one world, ``Discrete``, ``MultiDiscrete`` or ``Box`` in ``[-1, 1]``.
        num_envs: worlds that :meth:`remember` receives.
        device: of parameters and replay.
        size: widths of the model, or the name of a preset.
        observations: glob patterns of the observation keys that the model sees and predicts.
        targets: of those that it predicts without seeing them, such as ``privileged_state``: they shape the latent
            state, and a player does without them.
        replay_ratio: gradient steps per policy step after ``learning_starts``.
        learning_starts: policy steps before the first update.
        batch_size, batch_length: sequences per update and steps per sequence.
        replay_size: policy steps kept.
        imagination_length: imagined steps ``I``.
        horizon: discount horizon in steps.
        loss_scales: overrides of :data:`LOSS_SCALES`; ``reconstruction`` is for each observation key, targets too.
        learning_rate, warmup, betas, eps, agc: see :class:`~sheeplike.nn.optimizers.LaProp`.
        slow_critic_rate: how far the slow critic moves towards the fast one after each update.
        unimix, policy_unimix: share of a uniform distribution in the latents, and in a discrete policy.
        compile: how updates and acting are made fast; see :class:`~sheeplike.nn.compilation.Compilation`.
        autocast: makes the context of mixed precision, such as ``fabric.autocast``.
        seed: of parameters, latents and replay sampling.

    Raises:
        ValueError: an argument that cannot work; the message names it, what was expected and the nearest valid value.
        MemoryError: the replay does not fit.
    """

    def __init__(
        self,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Space,
        *,
        num_envs: int,
        device: torch.device | str = "cpu",
        size: Size | str = "12m",
        observations: Sequence[str] = ("pixels/*",),
        targets: Sequence[str] = (),
        replay_ratio: float = 0.0625,
        learning_starts: int = 0,
        batch_size: int = 16,
        batch_length: int = 64,
        replay_size: int = 1_000_000,
        imagination_length: int = 15,
        horizon: float = 333.0,
        return_lambda: float = 0.95,
        entropy_scale: float = 3e-4,
        slow_critic_rate: float = 0.02,
        free_nats: float = 1.0,
        unimix: float = 0.01,
        policy_unimix: float = 0.0,
        loss_scales: Mapping[str, float] | None = None,
        learning_rate: float = 4e-5,
        warmup: int = 1000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        agc: float = 0.3,
        compile: str = "off",
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        seed: int = 0,
    ) -> None:
        if isinstance(size, str):
            if size not in SIZES:
                raise ValueError(f"size {size!r}: expected one of {', '.join(SIZES)}")
            size = SIZES[size]
        self.device = torch.device(device)
        self.num_envs, self.imagination_length = num_envs, imagination_length
        self.batch_size, self.batch_length = batch_size, batch_length
        self.horizon, self.return_lambda, self.entropy_scale = horizon, return_lambda, entropy_scale
        self.slow_critic_rate, self.autocast = slow_critic_rate, autocast
        self.keys = ModelKeys(observation_space, observations)
        self.predicted = self.keys.with_targets(observation_space, targets)
        self.targets = [key for key in self.predicted.spaces if key not in self.keys.spaces]
        self.codec = ActionCodec(action_space)
        self.scales = {**LOSS_SCALES, **(loss_scales or {})}
        if unknown := self.scales.keys() - LOSS_SCALES.keys():
            raise ValueError(f"loss scale {sorted(unknown)[0]!r}: expected one of {', '.join(LOSS_SCALES)}")
        with own_randomness(self.device):
            torch.manual_seed(seed)
            self.world_model = WorldModel(
                self.keys,
                self.codec.width,
                size,
                unimix=unimix,
                free_nats=free_nats,
                horizon=horizon,
                predicted=self.predicted,
            ).to(self.device)
            features = self.world_model.rssm.features
            self.actor_critic = ActorCritic(features, self.codec, size.units, unimix=policy_unimix).to(self.device)
        self.modules = nn.ModuleDict({"world_model": self.world_model, "actor_critic": self.actor_critic})
        trained = [p for p in self.modules.parameters() if p.requires_grad]
        self.optimizer = LaProp(trained, learning_rate, betas=betas, eps=eps, agc=agc, warmup=warmup)
        self.replay = SequenceReplay(
            replay_spec(self.predicted, self.codec, size),
            num_envs=num_envs,
            size=replay_size,
            sequence=batch_length + CONTEXT,
            device=self.device,
            seed=seed,
            refreshed=LATENTS,
        )
        self.ratio = Ratio(replay_ratio, start=learning_starts)
        none = torch.zeros(batch_size, dtype=torch.int64, device=self.device)
        self.faults = Faults(self.device, worlds=none, starts=none)
        self.generator = self.replay.generator
        self.skipped_in_a_row, self.skipped_total = self.faults.skipped_in_a_row, self.faults.skipped_total
        self._compile(compile)

    def _compile(self, mode: str) -> None:
        """What is compiled and captured; everything else is written as if it were not."""
        self.compiled = Compilation(mode, self.device)
        world, critic = self.world_model, self.actor_critic
        self.compiled.methods(world.encoder, "forward")
        self.compiled.methods(world.rssm, "observe_step")
        self.compiled.methods(world, "losses")
        self.compiled.methods(critic, "imagine_step")
        self.compiled.methods(self, "behaviour_losses", "_act")
        self._learn = self.compiled.step(self._learn)

    # --- acting and remembering -------------------------------------------------------------------------------------

    def player(self, num_envs: int) -> DreamerPlayer:
        """A fresh player for ``num_envs`` worlds; it shares this agent's parameters and nothing else."""
        return DreamerPlayer(self, num_envs)

    @torch.no_grad()
    def act(
        self, latent: Latent, action: Tensor, obs: Mapping[str, Tensor], is_first: Tensor, *, sample: bool
    ) -> tuple[Latent, Tensor]:
        """From the state and action of the last step, and what is seen now, to the state and action of this one."""
        with self.autocast():
            return self._act(latent, action, obs, is_first, sample)

    def _act(
        self, latent: Latent, action: Tensor, obs: Mapping[str, Tensor], is_first: Tensor, sample: bool
    ) -> tuple[Latent, Tensor]:
        step = {key: value.unsqueeze(1) for key, value in obs.items()}
        latent, _ = self.world_model.observe(latent, action.unsqueeze(1), step, is_first.unsqueeze(1))
        latent = latent.map(lambda x: x.squeeze(1))
        policy = self.actor_critic.policy(latent.features)
        return latent, policy.sample() if sample else policy.mode()

    def remember(self, step: Step) -> None:
        """Store one step of all worlds, with the latent that the player had after seeing it."""
        self.replay.add(to_store(step, self.predicted, self.codec))

    def forget(self) -> None:
        """The replay is empty, as in a new agent."""
        self.replay.clear()
        self.faults.forget()

    def updates_due(self, policy_steps: int) -> int:
        """Gradient steps due by the replay ratio.

        None before ``learning_starts``, nor before the replay holds the steps of one batch; none is made up for later.
        """
        needed = min(self.batch_size * self.batch_length, self.replay.length * self.num_envs)
        if not self.replay.ready or len(self.replay) < needed:
            self.ratio.skip(policy_steps)
        return self.ratio(policy_steps)

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, Tensor]:
        """One gradient step of world model, actor and critic on one batch of sequences.

        Static shapes, one backward pass, no host synchronisation. Returns 0-dim device tensors. Where a loss or a
        gradient is not finite, nothing changes but ``skipped_in_a_row`` and what is drawn next.
        """
        return self._learn(*self.replay.draw(self.batch_size))

    def _learn(self, worlds: Tensor, starts: Tensor) -> dict[str, Tensor]:
        """The gradient step on the sequences that ``worlds`` and ``starts``, ``(B,)`` int64, name in the replay."""
        sample = self.replay.gather(worlds, starts)
        returns = self.actor_critic.return_scale.range
        returns_before = returns.clone()
        with self.autocast():
            losses, metrics, posterior = self.losses(sample.data)
        means, total = self.total(losses)
        self.optimizer.zero_grad(set_to_none=False)
        total.backward()
        norms = self._gradient_norms()
        means = {name: mean.detach() for name, mean in (means | {"total": total}).items()}
        finite = torch.stack([means["total"], *norms.values()]).isfinite().all()
        # Asked for on its own: an infinite reward falls into the last bin, and its loss is finite.
        finite &= sample.data["reward"].isfinite().all()
        skip = self.faults.count(finite, worlds=worlds, starts=starts)
        metrics |= {f"loss/{name}": mean for name, mean in means.items()} | norms | health(means["total"], skip)
        metrics["opt/learning_rate"] = self.optimizer.learning_rate()
        self.optimizer.found_inf = skip
        self.optimizer.step()
        update_slow(self.actor_critic.slow_value, self.actor_critic.value, self.slow_critic_rate, skip)
        returns.copy_(torch.where(finite, returns, returns_before))
        # The latents were computed by parameters that have just changed, but are fresher than those stored.
        fresh = compact(posterior.detach())
        fresh = {name: torch.where(finite, value, sample.data[name][:, CONTEXT:]) for name, value in fresh.items()}
        self.replay.write_back(sample.worlds, sample.times[:, CONTEXT:], fresh)
        return metrics

    def total(self, losses: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Means of the losses by name, and what is minimised: their weighted sum."""
        assert losses.keys() - set(self.predicted.spaces) == self.scales.keys() - {"reconstruction"}, (
            "a loss without a scale"
        )
        means = {name: loss.mean() for name, loss in losses.items()}
        return means, sum(self._scale(name) * mean for name, mean in means.items())

    def losses(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Latent]:
        """All losses on sequences ``(B, CONTEXT + T, ...)``: losses by name, metrics, posterior states ``(B, T)``."""
        world = self.world_model
        # The context step gives the latent and the action that lead into the first trained step.
        start = self.context(data)
        previous_action = data["action"][:, CONTEXT - 1 : -1]
        batch = {key: value[:, CONTEXT:] for key, value in data.items()}
        posterior, logits = world.observe(start, previous_action, batch, batch["is_first"])
        losses, metrics = world.losses(posterior, logits, batch)
        # Imagination starts from every replayed state, sequences first, then time.
        starts = posterior.detach().map(lambda x: x.flatten(0, 1))
        imagined = self.actor_critic.imagine(world.rssm, starts, self.imagination_length)
        behaviour, info = self.behaviour_losses(*imagined, posterior.features, batch)
        return losses | behaviour, metrics | info, posterior

    def behaviour_losses(
        self, features: Tensor, actions: Tensor, replayed: Tensor, batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses of actor and critic by name, and metrics.

        Args:
            features, actions: imagined, ``(B * T, I + 1, F)`` and ``(B * T, I + 1, A)``.
            replayed: features ``(B, T, F)`` of the states in which imagination began, with gradient.
            batch: ``reward``, ``is_last`` and ``is_terminal`` ``(B, T)`` of the same.
        """
        world, critic = self.world_model, self.actor_critic
        with torch.no_grad():
            reward, cont = world.reward(features).pred(), world.cont(features).prob()
            slow, slow_replayed = critic.slow_value(features), critic.slow_value(replayed)
        losses, returns, metrics = imagination_loss(
            actions,
            reward,
            cont,
            critic.policy(features),
            critic.value(features),
            slow,
            critic.return_scale,
            lam=self.return_lambda,
            entropy_scale=self.entropy_scale,
        )
        losses["replay_value"] = replay_value_loss(
            batch["is_last"],
            batch["is_terminal"],
            batch["reward"],
            returns[:, 0].unflatten(0, batch["reward"].shape),
            critic.value(replayed),  # not detached: the critic shapes the representation
            slow_replayed,
            horizon=self.horizon,
            lam=self.return_lambda,
        )
        return losses, metrics

    def report(self) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
        """Open-loop prediction on replayed sequences: metrics, and the images of each camera."""
        if not self.replay.ready:
            return {}, {}
        # Reporting must not disturb learning: neither its randomness nor the queue of fresh sequences.
        state = self.replay.generator.get_state(), self.replay.fresh.copy()
        with own_randomness(self.device), torch.no_grad(), self.autocast(), self.compiled.paused():
            data = self.replay.sample(min(self.batch_size, 6)).data
            self.replay.generator.set_state(state[0])
            self.replay.fresh = state[1]
            batch = {key: value[:, CONTEXT:] for key, value in data.items()}
            return open_loop(self.world_model, self.context(data), data["action"][:, CONTEXT - 1 : -1], batch)

    def counters(self, policy_steps: int, gradient_steps: int) -> dict[str, float]:
        """Size of the replay in policy steps, and gradient steps per policy step since learning started."""
        learned = max(policy_steps - self.ratio.start, 1)
        return {"replay/size": float(len(self.replay)), "replay/ratio_actual": gradient_steps / learned}

    def offending_batch(self) -> dict[str, Tensor]:
        """See :func:`sheeplike.agents.dreamer_v3.inspection.offending_batch`."""
        return inspection.offending_batch(self)

    def examine(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :func:`sheeplike.agents.dreamer_v3.inspection.examine`."""
        return inspection.examine(self, batch)

    def warm_up(self) -> float:
        """Compile the update and time it on the first sequence in memory, in seconds; nothing of the agent changes."""
        none = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        first = self.replay.gather(none[:1], none[:1])
        latents = {name: first.data[name].clone() for name in LATENTS}
        try:
            with rehearsal(self.modules, self.optimizer, self.faults, self.device):
                return self.compiled.warm_up(lambda: self._learn(none, none))
        finally:
            self.replay.write_back(first.worlds, first.times, latents)

    def _scale(self, name: str) -> float:
        return self.scales["reconstruction" if name in self.predicted.spaces else name]

    def context(self, data: Mapping[str, Tensor]) -> Latent:
        """The stored latent ``(B, ...)`` from which the trained part of replayed sequences begins."""
        return expand(*(data[name][:, CONTEXT - 1] for name in LATENTS), self.world_model.rssm.classes)

    def _gradient_norms(self) -> dict[str, Tensor]:
        parts = {
            "world_model": self.world_model.parameters(),
            "actor": self.actor_critic.policy.parameters(),
            "critic": self.actor_critic.value.parameters(),
        }
        return {f"grad_norm/{n}": nn.utils.get_total_norm([p.grad for p in ps]) for n, ps in parts.items()}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def history(self) -> SequenceReplay:
        """What was seen and done; the latents, which every update refreshes, are part of the state."""
        return self.replay

    def state_dict(self, *, replay: bool = True, history: bool = True) -> dict[str, Any]:
        """Everything that a continuation needs; without ``replay`` it starts again from an empty ring, without
        ``history`` the ring is without what never changes."""
        state = {
            "modules": self.modules.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ratio": self.ratio.state_dict(),
        } | self.faults.state_dict()
        return state | ({"replay": self.replay.state_dict(history=history)} if replay else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.modules.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ratio.load_state_dict(state["ratio"])
        self.faults.load_state_dict(state)
        if "replay" in state:
            self.replay.load_state_dict(state["replay"])
