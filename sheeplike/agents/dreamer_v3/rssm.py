"""The recurrent state-space model of DreamerV3.

Source: the paper's section "World model learning"; ``danijar/dreamerv3`` ``rssm.py``.

A latent state is a deterministic vector, carried by a block-diagonal GRU, and 32 categorical variables. The *posterior*
over the categoricals sees the current observation, the *prior* predicts them without it.

Shape letters: ``B`` batch, ``T`` time, ``D`` deter, ``S K`` stoch groups x classes, ``E`` embedding, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sheeplike.nn.distributions import OneHotCategorical, categorical_kl
from sheeplike.nn.layers import MLP, BlockLinear, Linear, NormAct


class Latent(NamedTuple):
    """State of the world model.

    Attributes:
        deter: ``(..., D)`` float32.
        stoch: ``(..., S, K)`` float32, one-hot; carries the straight-through gradient while learning.
    """

    deter: Tensor
    stoch: Tensor

    @property
    def features(self) -> Tensor:
        """Input of every head, ``(..., D + S*K)``."""
        return torch.cat([self.deter, self.stoch.flatten(-2)], -1)

    def reset(self, where: Tensor) -> Latent:
        """Return the zero state where ``where (B,)`` is true."""
        return Latent(torch.where(where[:, None], 0.0, self.deter), torch.where(where[:, None, None], 0.0, self.stoch))

    def detach(self) -> Latent:
        return Latent(self.deter.detach(), self.stoch.detach())

    def map(self, function: Callable[[Tensor], Tensor]) -> Latent:
        return Latent(function(self.deter), function(self.stoch))


def stack_latents(states: Sequence[Latent]) -> Latent:
    """Stack ``T`` latents ``(B, ...)`` into one, ``(B, T, ...)``."""
    return Latent(*(torch.stack(part, 1) for part in zip(*states, strict=True)))


def cast_weights(module: nn.Module, device: str) -> dict[str, Tensor]:
    """Return the detached weights of a module in autocast's precision: a loop casts them once, not in each step."""
    mixed, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return {name: p.detach().to(dtype if mixed and p.dim() > 1 else p.dtype) for name, p in module.named_parameters()}


def defers(device: torch.device) -> bool:
    """Return True if a scan defers the gradients of its weights to its end; on a CPU that saves nothing."""
    return device.type != "cpu"


class DeferredGradients(torch.autograd.Function):
    """Zeros that are added to the outputs of every step of a loop, which computes with detached weights.

    The backward pass through the loop then carries the gradient of the state alone. This function receives the gradient
    of all outputs, computes all steps once more side by side, and so finds the gradient of each weight as one product
    over batch and time, instead of a sum of small products that cost a GPU a few kernels each.
    """

    @staticmethod
    def forward(
        ctx: Any, again: Callable[[], tuple[Tensor, ...]], shapes: Sequence[Sequence[int]], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.again, ctx.weights = again, weights
        return tuple(weights[0].new_zeros(()).expand(shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            outputs = ctx.again()
        cast = [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs, strict=True)]
        return None, None, *torch.autograd.grad(outputs, ctx.weights, cast, allow_unused=True)


class RSSM(nn.Module):
    """Sequence model, prior and posterior.

    Args:
        embed: width ``E`` of the encoder's output.
        actions: width ``A`` of the action.
        stoch: categorical groups ``S``.
        blocks: blocks of the recurrent layers.
        unimix: share of a uniform distribution in prior and posterior.
        free_nats: KL divergence, in nats, below which it has no gradient.
    """

    def __init__(
        self,
        embed: int,
        actions: int,
        *,
        deter: int,
        hidden: int,
        classes: int,
        stoch: int = 32,
        blocks: int = 8,
        unimix: float,
        free_nats: float,
    ) -> None:
        super().__init__()
        self.deter, self.stoch, self.classes, self.blocks = deter, stoch, classes, blocks
        self.unimix, self.free_nats = unimix, free_nats
        flat = stoch * classes
        self.features = deter + flat
        # Three input layers, so that no input can drown the others before the norm.
        self.in_deter = nn.Sequential(Linear(deter, hidden), NormAct(hidden))
        self.in_stoch = nn.Sequential(Linear(flat, hidden), NormAct(hidden))
        self.in_action = nn.Sequential(Linear(actions, hidden), NormAct(hidden))
        self.hidden = BlockLinear(deter + blocks * 3 * hidden, deter, blocks)
        self.hidden_norm = NormAct(deter)  # over the whole vector, not per block
        self.gates = BlockLinear(deter, 3 * deter, blocks)
        self.prior_net = nn.Sequential(MLP(deter, hidden, 2), Linear(hidden, flat))
        self.posterior_in = Linear(deter + embed, hidden)
        self.posterior_net = nn.Sequential(NormAct(hidden), Linear(hidden, flat))

    def initial(self, batch: int, device: torch.device) -> Latent:
        return Latent(
            torch.zeros(batch, self.deter, device=device), torch.zeros(batch, self.stoch, self.classes, device=device)
        )

    def split(self, features: Tensor) -> Latent:
        """Return the latent of :attr:`Latent.features` ``(..., D + S*K)``."""
        deter, stoch = features.split([self.deter, self.stoch * self.classes], -1)
        return Latent(deter, stoch.unflatten(-1, (self.stoch, self.classes)))

    def distribution(self, logits: Tensor) -> OneHotCategorical:
        return OneHotCategorical(logits, self.unimix)

    def embed_action(self, action: Tensor) -> Tensor:
        """Embed actions ``(..., A)``; numbers beyond 1, which imagined actions may have, are scaled back."""
        return self.in_action(action / action.abs().clamp_min(1.0).detach())

    def advance(self, latent: Latent, action: Tensor) -> Tensor:
        """Return the next deter ``(B, D)`` after a latent and an embedded action ``(B, hidden)``."""
        deter, g = latent.deter, self.blocks
        inputs = torch.cat([self.in_deter(deter), self.in_stoch(latent.stoch.flatten(-2)), action], -1)
        # Each block sees its own slice of the state and all of the inputs.
        shared = inputs.unsqueeze(-2).expand(*inputs.shape[:-1], g, -1)
        x = torch.cat([deter.unflatten(-1, (g, -1)).to(shared.dtype), shared], -1).flatten(-2)
        x = self.hidden_norm(self.hidden(x))
        # The gates are split per block; splitting the flat vector in three would mix the blocks.
        reset, candidate, update = self.gates(x).unflatten(-1, (g, -1)).float().chunk(3, -1)
        # A bias of -1 keeps 73 % of the state at initialisation.
        update = torch.sigmoid(update.flatten(-2) - 1)
        candidate = torch.tanh(torch.sigmoid(reset.flatten(-2)) * candidate.flatten(-2))
        return update * candidate + (1 - update) * deter

    def prior(self, deter: Tensor) -> Tensor:
        """Return logits ``(..., S, K)`` without an observation."""
        return self.prior_net(deter).unflatten(-1, (self.stoch, self.classes))

    def posterior(self, deter: Tensor, embed: Tensor) -> Tensor:
        """Return logits ``(..., S, K)`` given :meth:`embed_obs` of the observation."""
        # One linear layer on [deter, embed], split so that all time steps of ``embed`` go through in one product.
        x = torch.nn.functional.linear(deter, self.posterior_in.weight[:, : self.deter]) + embed
        return self.posterior_net(x).unflatten(-1, (self.stoch, self.classes))

    def embed_obs(self, embed: Tensor) -> Tensor:
        """Return the observation's share of the posterior's first layer, bias included."""
        return torch.nn.functional.linear(embed, self.posterior_in.weight[:, self.deter :], self.posterior_in.bias)

    def observe(self, latent: Latent, action: Tensor, embed: Tensor, is_first: Tensor) -> tuple[Latent, Tensor]:
        """Follow observed sequences.

        Args:
            latent: state before the first step, ``(B, ...)``.
            action: ``(B, T, A)``, the action that *led to* each step (the previous one).
            embed: ``(B, T, E)``.
            is_first: ``(B, T)`` bool; there the state and the previous action are zeroed, at every ``t``.

        Returns:
            Posterior states ``(B, T, ...)`` and logits ``(B, T, S, K)`` float32.
        """
        # torch.where, since a product with zero would keep a NaN.
        actions = self.embed_action(torch.where(is_first.unsqueeze(-1), 0.0, action))
        embeds = self.embed_obs(embed)
        starts, ends, after, logits = [], [], [], []
        observe_step, weights, taps = self, {}, ()
        if torch.is_grad_enabled():
            # Later latents require a gradient; a first one that does not would have the step compiled once more.
            latent = latent.map(lambda x: x if x.requires_grad else x.detach().requires_grad_())
            if defers(action.device):
                weights, taps = self._defer(starts, ends, actions, embeds, is_first)
            observe_step = partial(self.observe_step, weights)
        # unbind, since the gradient of an index fills and adds the whole sequence at each step.
        for step in zip(actions.unbind(1), embeds.unbind(1), is_first.unbind(1), *taps, strict=True):
            starts.append(latent.detach())
            latent, logit = observe_step(latent, *step)
            after.append(latent)
            ends.append(latent.detach())
            logits.append(logit)
        return stack_latents(after), torch.stack(logits, 1).float()

    def observe_step(
        self,
        weights: Mapping[str, Tensor],
        latent: Latent,
        action: Tensor,
        embed: Tensor,
        is_first: Tensor,
        *taps: Tensor,
    ) -> tuple[Latent, Tensor]:
        """Take one step of :meth:`observe` in learning, with embedded action and observation ``(B, hidden)``.

        Args:
            weights: tensors by name that replace the module's own.
            is_first: ``(B,)`` bool.
            taps: zeros of :class:`DeferredGradients`, of the shapes of deter and logits; or none.
        """
        return functional_call(self, dict(weights), (latent, action, embed, is_first, *taps))

    def forward(
        self, latent: Latent, action: Tensor, embed: Tensor | None = None, is_first: Tensor | None = None, *taps: Tensor
    ) -> tuple[Latent, Tensor] | Latent:
        """Take :meth:`observe_step`, without an observation :meth:`imagine`; ``functional_call`` runs ``forward``."""
        if embed is None:
            return self.imagine(latent, action)
        deter = self.advance(latent.reset(is_first), action)
        deter = deter + taps[0] if taps else deter
        logit = self.posterior(deter, embed)
        logit = logit + taps[1] if taps else logit
        return Latent(deter, self.distribution(logit).sample()), logit

    def observe_all(
        self, start: Latent, action: Tensor, deter: Tensor, embed: Tensor, is_first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return deter and logits of steps side by side, from the latents before them and the deter after them."""
        return self.advance(start.reset(is_first), action), self.posterior(deter, embed)

    def _defer(
        self, starts: list[Latent], ends: list[Latent], actions: Tensor, embeds: Tensor, is_first: Tensor
    ) -> tuple[dict[str, Tensor], tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Return detached weights for all steps of a loop, and for each step the taps that collect their gradient."""
        # starts and ends, the latents before and after each step, are filled while the loop runs. They are detached, or
        # the graph would hold itself and never be freed.
        lead, device = actions.shape[:2], actions.device.type
        mixed, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        seen, done, first = embeds.detach().flatten(0, 1), actions.detach().flatten(0, 1), is_first.flatten()

        def all_steps() -> tuple[Tensor, Tensor]:
            start, end = (stack_latents(states).map(lambda x: x.flatten(0, 1)) for states in (starts, ends))
            with torch.autocast(device, dtype, enabled=mixed):
                deter, logits = self.observe_all(start, done, end.deter, seen, first)
            return deter.unflatten(0, lead), logits.unflatten(0, lead)

        shapes = (*lead, self.deter), (*lead, self.stoch, self.classes)
        taps = DeferredGradients.apply(all_steps, shapes, *self.parameters())
        return cast_weights(self, device), tuple(tap.unbind(1) for tap in taps)

    def imagine(self, latent: Latent, action: Tensor, *, sample: bool = True) -> Latent:
        """Imagine the next latents from latents ``(B, ...)`` and actions ``(B, A)``, drawn or the most likely ones."""
        deter = self.advance(latent, self.embed_action(action))
        prior = self.distribution(self.prior(deter))
        return Latent(deter, prior.sample() if sample else prior.mode())

    def kl(self, posterior: OneHotCategorical, prior: OneHotCategorical) -> tuple[Tensor, Tensor]:
        """Return dynamics and representation loss ``(B, T)`` in nats.

        The KL is summed over the categoricals *before* it is clipped at ``free_nats``.
        """
        dyn, rep = categorical_kl(posterior.detach(), prior), categorical_kl(posterior, prior.detach())
        return dyn.clamp_min(self.free_nats), rep.clamp_min(self.free_nats)
