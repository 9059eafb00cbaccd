"""The DreamerV3 learner: replay, losses and its one gradient update.

Source: DreamerV3 (Hafner et al., Nature 2025, arXiv 2301.04104v2) as implemented today by ``danijar/dreamerv3``.

Shape letters: ``N`` worlds, ``B`` batch, ``T`` sequence, ``I`` imagined steps, ``A`` action, ``F`` features.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import torch
from torch import Tensor, nn

from sheeplike.agents.agent import (
    Agent,
    Dream,
    Prediction,
    Ratio,
    Step,
    describe_observations,
    describe_sight,
    own_randomness,
)
from sheeplike.agents.dreamer_v3.actor_critic import imagination_loss, replay_value_loss, return_metrics
from sheeplike.agents.dreamer_v3.config import CONTEXT, DreamerV3Config
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.agents.dreamer_v3.probes import Probes
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.storage import LATENTS, ModelKeys, encode_step, pack_latent, replay_spec, unpack_latent
from sheeplike.agents.dreamer_v3.world_model import open_loop
from sheeplike.agents.nonfinite import SkipCounter, health, preserve_state
from sheeplike.memory import MixedReplay, SequenceReplay
from sheeplike.nn.cnn import to_pixels, to_unit
from sheeplike.nn.compilation import Compilation
from sheeplike.nn.optimizers import LaProp, update_slow
from sheeplike.ranks import ALONE, Ranks

FILMED = 6  # most sequences in a video
DREAMT, SEEN = 50, 5  # imagined steps of a dream, and real steps shown before it


class DreamerV3(Agent):
    """Learner of a world model, from replayed sequences, and of behaviour inside it.

    Args:
        num_envs: number ``N`` of training worlds.
        compile: mode of :class:`~sheeplike.nn.compilation.Compilation`.
        autocast: maker of the context of mixed precision, such as ``fabric.autocast``.
        seed: seed of parameters and replay sampling.
        ranks: processes that learn together, each from ``batch_size`` sequences of its own worlds.
        directory: place of the replay's file with ``replay_device=disk``.

    Raises:
        ValueError: the options do not suit the spaces.
        MemoryError: the replay does not fit.
    """

    networks_class: ClassVar[type[DreamerNetworks]] = DreamerNetworks

    def __init__(
        self,
        observation_space: gymnasium.spaces.Dict,
        action_space: gymnasium.spaces.Space,
        config: DreamerV3Config = DreamerV3Config(),  # noqa: B008, immutable
        *,
        num_envs: int,
        device: torch.device | str = "cpu",
        compile: str = "off",
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        seed: int = 0,
        ranks: Ranks = ALONE,
        directory: Path | None = None,
    ) -> None:
        self.config, self.num_envs, self.device, self.autocast = config, num_envs, torch.device(device), autocast
        self.ranks = ranks
        self.networks = self.networks_class(
            observation_space, action_space, config, device=device, autocast=autocast, seed=seed
        )
        self.keys, self.predicted, self.codec = self.networks.keys, self.networks.predicted, self.networks.codec
        self.world_model, self.actor_critic = self.networks.world_model, self.networks.actor_critic
        self.stored = self.networks.known.and_also(observation_space, config.probes)
        self.observed = self.stored.spaces
        self.scales = config.loss_scales.model_dump(by_alias=True)
        if self.world_model.reconstructs:
            del self.scales["barlow"]
        self.optimizer = self.make_optimizer([p for p in self.networks.parameters() if p.requires_grad])
        self.probes: Probes | None = None
        if config.probes:
            probed = ModelKeys(observation_space, config.probes)
            widths = self.world_model.rssm.features, config.widths.units
            self.probes = Probes(probed, *widths, device=self.device, seed=seed)
        self._make_replay = partial(
            SequenceReplay,
            replay_spec(self.stored, self.codec, config.widths),
            sequence=config.batch_length + CONTEXT,
            device=self.device,
            place="device" if config.replay_device == "auto" else config.replay_device,
            directory=directory,
            sampling=config.sampling,
            refreshed=LATENTS,
        )
        self.replay = self._make_replay(num_envs=num_envs, size=config.replay_size, seed=ranks.seed(seed))
        self.sampled: SequenceReplay | MixedReplay = self.replay  # what batches come from
        self.recorded: SequenceReplay | None = None
        self.held_out: SequenceReplay | None = None
        self._recordings: list[str] = []  # hashes of both, in the order of reading
        self.generator = self.replay.generator
        self.ratio = Ratio(config.replay_ratio, start=config.first_update(num_envs))
        self.skips = SkipCounter(self.device)
        self.skipped_in_a_row, self.skipped_total = self.skips.skipped_in_a_row, self.skips.skipped_total
        self._last_draw: tuple[Tensor, Tensor] | None = None
        # The model in which behaviour is learnt. A gradient through it must not reach its weights: a twin shares them.
        self.dreamt, self.dreamt_value = self.world_model, self.actor_critic.value
        if config.actor_gradient != "reinforce":
            self.dreamt, self.dreamt_value = _twin(self.dreamt), _twin(self.dreamt_value)
        # Takes the gradient of REINFORCE, which can be scaled only after that of the entropy is computed.
        self.reinforced = copy.deepcopy(self.actor_critic.policy) if ranks.size > 1 else None
        self._compile(compile)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer; one of your own needs ``found_inf`` and ``learning_rate()`` too."""
        config = self.config
        betas, eps, agc = (config.beta1, config.beta2), config.eps, config.agc
        return LaProp(parameters, config.learning_rate, betas=betas, eps=eps, agc=agc, warmup=config.warmup)

    def _compile(self, mode: str) -> None:
        """Compile and capture; no other code depends on it."""
        self.compiled = self.networks.compiled = Compilation(mode, self.device)
        world, critic = self.world_model, self.actor_critic
        self.compiled.methods(world.rssm, "observe_step")
        self.compiled.methods(critic, "imagine_step")
        self.compiled.methods(self, "behaviour_losses")
        # On a CPU these take long to compile and save little of a run (howto/make_it_fast.md).
        if self.device.type != "cpu":
            self.compiled.methods(self.networks, "_act")
            self.compiled.methods(world.rssm, "observe_all")
            self.compiled.methods(world.encoder, "forward")
            self.compiled.methods(world, "losses")
            if isinstance(self.optimizer, LaProp):
                self.compiled.methods(self.optimizer, "change")
        if self.ranks.size == 1:
            self._learn = self.compiled.step(self._learn)
        else:
            self._differentiate_share = self.compiled.step(self._differentiate_share)
            self._apply_sum = self.compiled.step(self._apply_sum)

    # --- collecting -------------------------------------------------------------------------------------------------

    def add(self, step: Step) -> None:
        self.replay.add(encode_step(step, self.stored, self.codec))
        self._update_norms(step.obs)

    def _update_norms(self, obs: dict[str, Tensor]) -> None:
        self.world_model.update_norms(obs, self.ranks)
        if self.probes is not None:
            self.probes.update_norms(obs, self.ranks)

    def add_recorded(self, steps: Iterable[Step], num_envs: int, length: int, share: float | None) -> None:
        if share is None:
            for step in steps:
                self.add(self._without_latents(step))
            self._fill_latents(self.replay)
        else:
            self.recorded = self._record(steps, num_envs, length, learnt=True)
            self.recorded.generator = self.generator
            self.sampled = MixedReplay(self.replay, self.recorded, share)

    def hold_out(self, steps: Iterable[Step], num_envs: int, length: int) -> None:
        self.held_out = self._record(steps, num_envs, length, learnt=False)

    def _record(self, steps: Iterable[Step], num_envs: int, length: int, *, learnt: bool) -> SequenceReplay:
        """Return a ring that holds exactly these steps."""
        ring = self._make_replay(num_envs=num_envs, size=num_envs * length, online=False)
        for step in steps:
            if learnt:
                self._update_norms(step.obs)
            ring.add(encode_step(self._without_latents(step), self.stored, self.codec))
        self._fill_latents(ring)
        self._recordings.append(self._digest(ring))
        return ring

    def _without_latents(self, step: Step) -> Step:
        rings = {name: self.replay.storage[name] for name in LATENTS}
        step.extras = {name: ring.new_zeros(len(step.reward), *ring.shape[2:]) for name, ring in rings.items()}
        return step

    @torch.no_grad()
    def _fill_latents(self, ring: SequenceReplay) -> None:
        """Infer the latents of all steps that a ring holds, in order of time."""
        latent = self.world_model.rssm.initial(ring.num_envs, self.device)
        action = torch.zeros(ring.num_envs, 1, self.codec.width, device=self.device)
        with own_randomness(self.device, seed=0), self.compiled.paused(), self.autocast():
            for time in range(ring.oldest, ring.added):
                stored = ring.read_steps(time, time + 1)
                row = {key: value[0].to(self.device).unsqueeze(1) for key, value in stored.items()}
                latent, *_ = self.world_model.observe(latent, action, row, row["is_first"])
                latent, action = latent.map(lambda x: x.squeeze(1)), row["action"]
                for name, value in pack_latent(latent).items():
                    ring.storage[name][time % ring.length] = value

    def validate(self) -> dict[str, Tensor]:
        """Return losses of the world model on the held-out episodes, and their sum: nats of a whole step."""
        if self.held_out is None:
            return {}
        self._fill_latents(self.held_out)
        with own_randomness(self.device, seed=0), torch.no_grad(), self.compiled.paused(), self.autocast():
            found = []
            for start in range(0, self.held_out.added - self.held_out.sequence + 1, self.config.batch_length):
                envs = torch.arange(self.held_out.num_envs)
                data = self.held_out.gather(*self.held_out.fetch(envs, torch.full_like(envs, start))).data
                batch = {key: value[:, CONTEXT:] for key, value in data.items()}
                action = data["action"][:, CONTEXT - 1 : -1]
                states, logits, embed = self.world_model.observe(self.context(data), action, batch, batch["is_first"])
                losses, metrics = self.world_model.losses(states, logits, batch, embed)
                losses = {name: loss.mean() for name, loss in losses.items() if name not in ("barlow", "dyn", "rep")}
                found.append(losses | {"kl": metrics["wm/kl"]})
        means = {name: torch.stack([one[name] for one in found]).mean() for name in found[0]}
        return {f"held_out/{name}": value for name, value in means.items()} | {"held_out/nll": sum(means.values())}

    def updates_due(self, policy_steps: int) -> int:
        """Return the gradient steps due; before the replay holds a batch, none accrue."""
        needed = min(self.config.batch_size * self.config.batch_length, self.replay.length * self.num_envs)
        if not self.replay.ready or len(self.replay) < needed:
            self.ratio.skip(policy_steps)
        return self.ratio(policy_steps)

    # --- learning ---------------------------------------------------------------------------------------------------

    def update(self) -> dict[str, Tensor]:
        """Make one gradient step; static shapes, one backward pass, no host synchronisation."""
        self._last_draw = self.sampled.draw(self.config.batch_size)
        fetched = self.sampled.fetch(*self._last_draw)
        return (self._learn if self.ranks.size == 1 else self._learn_together)(*fetched)

    def _learn(self, envs: Tensor, starts: Tensor, fetched: dict[str, Tensor]) -> dict[str, Tensor]:
        """Learn from the sequences of :meth:`SequenceReplay.fetch`."""
        before = self._return_ranges()
        data, _, times = self.sampled.gather(envs, starts, fetched)
        means, metrics, fresh = self._differentiate(data)
        # An infinite reward has a finite loss (the last bin's), so rewards are checked too.
        finite = data["reward"].isfinite().all()
        stored = {name: data[name][:, CONTEXT:] for name in fresh}
        return self._apply(envs, times, stored, fresh, means, metrics, finite, before)

    def _differentiate(
        self, data: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Compute the gradients of all losses; return means of the losses, metrics, and new latents to store."""
        with self.autocast():
            losses, metrics, posterior = self.losses(data)
        reinforce = losses.pop("reinforce", None)
        means, total = self.total(losses)
        if reinforce is not None:
            means["reinforce"] = reinforce.mean()
            total = total + self.scales["policy"] * means["reinforce"]
        self.optimizer.zero_grad()
        total.backward()
        if self.probes is not None:
            batch = {key: data[key][:, CONTEXT:] for key in self.probes.names}
            metrics |= self.probes.differentiate(posterior.features, batch)
        means = {name: mean.detach() for name, mean in (means | {"total": total}).items()}
        return means, metrics, pack_latent(posterior.detach())

    def _apply(
        self,
        envs: Tensor,
        times: Tensor,
        stored: dict[str, Tensor],
        fresh: dict[str, Tensor],
        means: dict[str, Tensor],
        metrics: dict[str, Tensor],
        finite: Tensor,
        returns_before: list[Tensor],
    ) -> dict[str, Tensor]:
        """Make the step that the gradients ask for, or skip it if a number was not finite; return all metrics."""
        norms = self._gradient_norms()
        finite = finite & torch.stack([means["total"], *norms.values()]).isfinite().all()
        skip = self.skips.count(finite)
        metrics |= {f"loss/{name}": mean for name, mean in means.items()} | norms | health(means["total"], skip)
        metrics["opt/learning_rate"] = self.optimizer.learning_rate()
        self.optimizer.found_inf = skip
        self.optimizer.step()
        for behaviour, before in zip(self.networks.behaviours.values(), returns_before, strict=True):
            update_slow(behaviour.slow_value, behaviour.value, self.config.slow_critic_rate, skip)
            returns = behaviour.return_scale.range
            returns.copy_(torch.where(finite, returns, before))
        # These latents are one update old, but newer than those stored.
        fresh = {name: torch.where(finite, value, stored[name]) for name, value in fresh.items()}
        self.sampled.write_back(envs, times[:, CONTEXT:], fresh)
        if self.probes is not None:
            self.probes.step(metrics.pop("probe/loss"), skip)
        return metrics

    # --- learning with other ranks ----------------------------------------------------------------------------------

    def _learn_together(
        self, envs: Tensor, starts: Tensor, fetched: dict[str, Tensor], *, exchange: bool = True
    ) -> dict[str, Tensor]:
        """Make the step that one rank would make with the sequences of all: a collective of sums, and one of returns.

        Collectives are eager, between two halves that may be captured. Without ``exchange`` the others are like this.
        """
        flat, returns, *rest = self._differentiate_share(envs, starts, fetched)
        if exchange:
            flat, returns = self.ranks.sum(flat), self.ranks.gather(returns)
        else:
            returns = returns.repeat(self.ranks.size, 1, 1, 1)
        return self._apply_sum(flat, returns, envs, *rest)

    def _differentiate_share(self, envs: Tensor, starts: Tensor, fetched: dict[str, Tensor]) -> tuple[Any, ...]:
        """Return what all ranks add up: gradients, sums and counts of the metrics, and 1 if a number is not finite.

        The gradient of REINFORCE, not yet scaled, stands behind the others. Also returned are the imagined returns,
        and times, stored and new latents of the sequences.
        """
        with torch.no_grad():
            torch._foreach_copy_(list(self.reinforced.parameters()), list(self.actor_critic.policy.parameters()))
        self.reinforced.zero_grad()
        data, _, times = self.sampled.gather(envs, starts, fetched)
        means, metrics, fresh = self._differentiate(data)
        finite = means["total"].isfinite() & data["reward"].isfinite().all()
        returns = metrics.pop("returns")
        learners = [self.networks] if self.probes is None else [self.networks, self.probes.heads]
        self._shared = [p for learner in learners for p in learner.parameters() if p.grad is not None]
        gradients = [p.grad for p in (*self._shared, *self.reinforced.parameters())]
        self._names = list(means), list(metrics)
        values = torch.stack([*means.values(), *metrics.values()])
        known = ~values.isnan()
        known[: len(means)] = True  # a loss that is NaN on one rank is NaN on all; a metric may be undefined
        tail = [torch.where(known, values, 0.0), known, ~finite[None]]
        flat = torch.cat([part.flatten().to(values.dtype) for part in (*gradients, *tail)])
        return flat, returns, times, {name: data[name][:, CONTEXT:] for name in fresh}, fresh

    def _apply_sum(
        self,
        flat: Tensor,
        returns: Tensor,
        envs: Tensor,
        times: Tensor,
        stored: dict[str, Tensor],
        fresh: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Make the step from the sum of all ranks' ``flat``, and their ``returns (ranks, 2, B, I)``."""
        policy, scaling = list(self.actor_critic.policy.parameters()), self.actor_critic.return_scale
        before, (ret, error) = self._return_ranges(), returns.transpose(0, 1).flatten(1)
        spread = scaling.update(ret)
        owners, number = [*self._shared, *policy], sum(map(len, self._names))
        *gradients, sums, counts, nonfinite = flat.split([*(p.numel() for p in owners), number, number, 1])
        gradients = torch._foreach_div(gradients, float(self.ranks.size))
        for p, gradient in zip(self._shared, gradients, strict=False):
            p.grad = gradient.view_as(p)
        for p, gradient in zip(policy, gradients[len(self._shared) :], strict=True):
            p.grad += gradient.view_as(p) / spread
        values = torch.where(counts > 0, sums / counts, torch.nan).unbind()
        means = dict(zip(self._names[0], values, strict=False))
        metrics = dict(zip(self._names[1], values[len(means) :], strict=True)) | return_metrics(ret, error, spread)
        reinforce = means.pop("reinforce")
        means["policy"] = means["policy"] + reinforce / spread
        means["total"] = means["total"] + self.scales["policy"] * (reinforce / spread - reinforce)
        return self._apply(envs, times, stored, fresh, means, metrics, nonfinite[0] == 0, before)

    def total(self, losses: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return means of the losses by name, and their weighted sum."""
        assert losses.keys() - set(self.predicted.spaces) == self.scales.keys() - {"reconstruction"}, losses.keys()
        means = {name: loss.mean() for name, loss in losses.items()}
        scales = self.scales | dict.fromkeys(self.predicted.spaces, self.scales["reconstruction"])
        return means, sum(scales[name] * mean for name, mean in means.items())

    def losses(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Latent]:
        """Return losses by name, metrics and posterior states ``(B, T)`` of ``data (B, CONTEXT + T, ...)``."""
        world = self.world_model
        # The context step gives the latent and the action that lead into the first trained step.
        start = self.context(data)
        previous_action = data["action"][:, CONTEXT - 1 : -1]
        batch = {key: value[:, CONTEXT:] for key, value in data.items()}
        posterior, logits, embed = world.observe(start, previous_action, batch, batch["is_first"])
        losses, metrics = world.losses(posterior, logits, batch, embed)
        # Imagination starts from every replayed state, sequences first, then time.
        starts = posterior.detach().map(lambda x: x.flatten(0, 1))
        critic, through = self.actor_critic, self.config.actor_gradient != "reinforce"
        policy = (self.reinforced or critic.policy) if through else None
        imagined = critic.imagine(self.dreamt.rssm, starts, self.config.imagination_length, policy)
        behaviour, info = self.behaviour_losses(*imagined, posterior.features, batch)
        return losses | behaviour, metrics | info, posterior

    def behaviour_losses(
        self, features: Tensor, actions: Tensor, replayed: Tensor, batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return losses of actor and critic by name, and metrics.

        Args:
            features, actions: imagined, ``(B * T, I + 1, F)`` and ``(B * T, I + 1, A)``.
            replayed: features ``(B, T, F)`` of the states in which imagination began, with gradient.
            batch: ``reward``, ``is_last`` and ``is_terminal`` ``(B, T)`` of these states.
        """
        critic, through = self.actor_critic, None
        with torch.set_grad_enabled(features.requires_grad):
            reward, cont = self.imagined_reward(features, actions), self.dreamt.cont(features).prob()
            if features.requires_grad:
                through, features = self.dreamt_value(features), features.detach()
        with torch.no_grad():
            slow, slow_replayed = critic.slow_value(features), critic.slow_value(replayed)
        losses, returns, metrics = imagination_loss(
            actions,
            reward,
            cont,
            critic.policy(features),
            critic.value(features),
            slow,
            critic.return_scale if self.reinforced is None else None,
            return_lambda=self.config.return_lambda,
            entropy_scale=self.config.entropy_scale,
            reinforced=None if self.reinforced is None else self.reinforced(features),
            through=through,
            dynamics=1.0 if self.config.actor_gradient == "dynamics" else 0.1,
        )
        losses["replay_value"] = replay_value_loss(
            batch["is_last"],
            batch["is_terminal"],
            batch["reward"],
            returns[:, 0].unflatten(0, batch["reward"].shape),
            critic.value(replayed),  # the critic shapes the representation
            slow_replayed,
            horizon=self.config.horizon,
            return_lambda=self.config.return_lambda,
        )
        return losses, metrics

    def imagined_reward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Return the reward for arriving at each imagined state, ``(B * T, I + 1)``."""
        reward = self.dreamt.reward(features)
        return reward.smooth_pred() if features.requires_grad else reward.pred()

    def report(self) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
        """Predict replayed sequences open-loop: metrics, and the images of each camera."""
        if not self.sampled.ready:
            return {}, {}
        with self._aside(), self.autocast():
            data = self.sampled.sample(min(self.config.batch_size, FILMED)).data
            batch = {key: value[:, CONTEXT:] for key, value in data.items()}
            return open_loop(self.world_model, self.context(data), data["action"][:, CONTEXT - 1 : -1], batch)

    def dream(self) -> dict[str, Dream]:
        """Imagine 50 steps under the policy, after the :func:`frames_before` of replayed sequences; by camera.

        The traces are reward, value, and the probability that the episode goes on.
        """
        world, critic = self.world_model, self.actor_critic
        if not self.sampled.ready or not world.decoder.keys.images:
            return {}
        with self._aside(), self.autocast():
            data = self.sampled.sample(min(self.config.batch_size, FILMED)).data
            batch = {key: value[:, CONTEXT:] for key, value in data.items()}
            action = data["action"][:, CONTEXT - 1 : -1]
            posterior, *_ = world.observe(self.context(data), action, batch, batch["is_first"])
            shown = frames_before(batch["is_first"], batch["is_last"])  # (B, SEEN)
            rows = torch.arange(len(shown), device=self.device)
            features, _ = critic.imagine(world.rssm, posterior.map(lambda x: x[rows, shown[:, -1]]), DREAMT)
            features = features[:, 1:].transpose(0, 1)  # (I, B, F), without the step that was seen
            traces = {
                "reward": world.reward(features).pred(),
                "value": critic.value(features).pred(),
                "continue": world.continue_prob(features),
            }
            painted = world.decoder(world.rssm.split(features.flatten(0, 1)))
        films = {}
        for key in world.decoder.keys.images:
            last = batch[key][rows, shown.T]
            seen = last if last.dtype == torch.uint8 else to_pixels(to_unit(last))
            model = to_pixels(painted[key].unflatten(0, features.shape[:2]))
            films[key.removeprefix("pixels/")] = Dream(seen, model, traces)
        return films

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Restore random generators and the queue of fresh sequences on exit; compute eagerly, without gradients."""
        state = self.replay.generator.get_state(), self.replay.fresh.copy()
        with own_randomness(self.device), torch.no_grad(), self.compiled.paused():
            try:
                yield
            finally:
                self.replay.generator.set_state(state[0])
                self.replay.fresh = state[1]

    def counters(self, policy_steps: int, gradient_steps: int) -> dict[str, float]:
        learned = max(policy_steps - self.ratio.start, 1)
        size = float(len(self.replay) * self.ranks.size)
        return {"replay/size": size, "replay/ratio_actual": gradient_steps / learned}

    def last_batch(self) -> dict[str, Tensor]:
        """Return the sequences of the last update, ``(B, CONTEXT + T, ...)``, as the replay holds them now.

        ``envs (B,)`` are their worlds; ``times (B, CONTEXT + T)`` count the steps of a world from its first.
        """
        if self._last_draw is None:
            return {}
        data, envs, times = self.sampled.gather(*self.sampled.fetch(*self._last_draw))
        return data | {"envs": envs, "times": times}

    def describe(self) -> dict[str, str]:
        config, ranks = self.config, self.ranks.size
        num_envs, ratio = self.num_envs * ranks, config.train_ratio * ranks
        due = num_envs * config.replay_ratio
        size = config.size if isinstance(config.size, str) else "of its own"
        parameters = sum(p.numel() for p in self.networks.parameters() if p.requires_grad)
        space = self.networks.space
        described = {"sees": describe_sight(space, self.keys.spaces)}
        if targets := self.networks.only_for_learning:
            described["predicts"] = f"{describe_observations(space, targets)}, not seen by the policy"
        if self.probes is not None:
            described["probes"] = describe_observations(space, self.probes.names)
        rhythm = f", then {due:g} gradient steps" if due >= 1 else f"; one gradient step every {1 / due:g} iterations"
        return described | {
            "agent": f"{config.name}, size {size}: {parameters:,} parameters",
            "one iteration": f"{num_envs} policy steps{rhythm}",
            "learning": f"from policy step {self.ratio.start:,} on; replay_ratio {config.replay_ratio:g} is "
            f"train_ratio {ratio:g}: each frame is replayed {ratio:g} times on average",
            "memory": f"replay of {self.replay.describe()}" + (", of each rank" if ranks > 1 else ""),
        }

    def warm_up(self) -> None:
        # Ranks may need different numbers of calls, so they exchange nothing here.
        step = self._learn if self.ranks.size == 1 else partial(self._learn_together, exchange=False)
        fetched = self.sampled.fetch(*torch.zeros(2, self.config.batch_size, dtype=torch.int64))
        data, envs, times = self.sampled.gather(*fetched)
        latents = {name: data[name].clone() for name in LATENTS}
        learners = [(self.networks, self.optimizer)]
        learners += [] if self.probes is None else [(self.probes.heads, self.probes.optimizer)]
        try:
            with ExitStack() as stack:
                for networks, optimizer in learners:
                    stack.enter_context(preserve_state(networks, optimizer, self.skips, self.device))
                self.compiled.warm_up(lambda: step(*fetched))
        finally:
            self.sampled.write_back(envs, times, latents)

    def context(self, data: Mapping[str, Tensor]) -> Latent:
        """Return the stored latent ``(B, ...)`` from which the trained part of sequences begins."""
        return unpack_latent(*(data[name][:, CONTEXT - 1] for name in LATENTS), self.world_model.rssm.classes)

    def _return_ranges(self) -> list[Tensor]:
        return [behaviour.return_scale.range.clone() for behaviour in self.networks.behaviours.values()]

    def _gradient_norms(self) -> dict[str, Tensor]:
        parts = {name: module for name, module in self.networks.named_children() if name != "actor_critic"}
        parts |= {"actor": self.actor_critic.policy, "critic": self.actor_critic.value}
        # Frozen parameters have no gradient.
        found = {name: [p.grad for p in part.parameters() if p.grad is not None] for name, part in parts.items()}
        return {f"grad_norm/{name}": nn.utils.get_total_norm(grads) for name, grads in found.items() if grads}

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def history(self) -> SequenceReplay:
        """Frames, actions and rewards; the latents, refreshed by every update, are part of the state."""
        return self.replay

    def state_dict(self, *, replay: bool = True, history: bool = True) -> dict[str, Any]:
        state = {
            "modules": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ratio": self.ratio.state_dict(),
            "recordings": self._recordings,
        } | self.skips.state_dict()
        state |= {} if self.probes is None else {"probes": self.probes.state_dict()}
        if self.recorded is not None:  # its frames are read again; only the latents have changed
            state["recorded"] = self.recorded.state_dict(history=False)
        return state | ({"replay": self.replay.state_dict(history=history)} if replay else {})

    def begin_with(self, state: Mapping[str, Any]) -> None:
        """Take networks and replay from the :meth:`state_dict` of another run; the steps of ``history`` may follow.

        Networks that only one of them has are left as they are; the optimizer begins anew.

        Raises:
            ValueError: weights, worlds, sizes or observations differ.
        """
        own = self.networks.state_dict()
        known = {name: value for name, value in state["modules"].items() if name in own}
        for name, value in known.items():
            if value.shape != own[name].shape:
                raise ValueError(f"{name} is {tuple(value.shape)}, expected {tuple(own[name].shape)}")
        self.networks.load_state_dict(own | known)
        # Sequences are drawn by this run's seed; those that wait to be drawn may be of another length.
        self.replay.load_state_dict(state["replay"] | {"generator": self.generator.get_state(), "fresh": ()})

    @staticmethod
    def _digest(ring: SequenceReplay) -> str:
        """Return a hash of what a ring holds and no update changes."""
        found = hashlib.sha256()
        for time in range(ring.oldest, ring.added):
            for _, value in sorted(ring.read_steps(time, time + 1).items()):
                found.update(value.contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.networks.load_state_dict(state["modules"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ratio.load_state_dict(state["ratio"])
        self.skips.load_state_dict(state)
        if self.probes is not None:
            self.probes.load_state_dict(state["probes"])
        if state["recordings"] != self._recordings:
            raise ValueError("the recorded episodes are not those with which the run began")
        if self.recorded is not None:
            self.recorded.load_state_dict(state["recorded"])
            self.recorded.expected = None
        if "replay" in state:
            self.replay.load_state_dict(state["replay"])


def _twin(module: nn.Module) -> nn.Module:
    """Return a module that computes with the weights of another and takes no gradient to them."""
    twin = copy.deepcopy(module).requires_grad_(False)
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        for own, shared in zip(tensors(twin), tensors(module), strict=True):
            own.data = shared.data
    return twin


def frames_before(is_first: Tensor, is_last: Tensor) -> Tensor:
    """Return the steps ``(B, SEEN)`` that are shown before the dream of each sequence ``(B, T)``.

    The dream begins at the sequence's last step that ends no episode. Shown are that step and those before it in its
    episode, whose first step is repeated if there are too few.
    """
    steps = torch.arange(is_first.shape[1], device=is_first.device)
    last = torch.where(is_last, 0, steps).amax(1, keepdim=True)
    begin = torch.where(is_first & (steps <= last), steps, 0).amax(1, keepdim=True)
    return (last - torch.arange(SEEN - 1, -1, -1, device=last.device)).maximum(begin)
