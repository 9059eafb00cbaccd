"""Updates that were skipped because a number in them was not finite: counted, and looked into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Faults:
    """Counts updates without asking the device, and keeps what names the batch of the first of a streak.

    Everything stays at its address: a captured update reads and writes it there.

    Args:
        device: of the counter.
        names: name to integers as an update is given them, such as ``worlds`` and ``starts``.

    Attributes:
        skipped_in_a_row: 0-dim int64; updates skipped since the last one whose numbers were finite.
        skipped_total: 0-dim int64; all that were ever skipped.
        first: as ``names``: what the first update of the present streak was given; -1 where that is not known.
    """

    def __init__(self, device: torch.device, **names: Tensor) -> None:
        self.skipped_in_a_row, self.skipped_total = (
            torch.zeros((), dtype=torch.int64, device=device) for _ in range(2)
        )
        self.first = {name: torch.full_like(given, -1) for name, given in names.items()}

    def count(self, finite: Tensor, **given: Tensor) -> Tensor:
        """Take in an update: whether its numbers were finite, 0-dim bool, and what named its batch.

        Returns:
            0-dim float32, 1 where it is to be skipped: an optimizer's ``found_inf``.
        """
        begins = ~finite & (self.skipped_in_a_row == 0)
        for name, kept in self.first.items():
            kept.copy_(torch.where(begins, given[name], kept))
        skipped = (~finite).long()
        self.skipped_in_a_row.add_(1).mul_(skipped)
        self.skipped_total.add_(skipped)
        return (~finite).float()

    def forget(self) -> None:
        """What the streak began with is not known any more."""
        for kept in self.first.values():
            kept.fill_(-1)

    def state_dict(self) -> dict[str, Tensor]:
        """The counters themselves."""
        return {"skipped_in_a_row": self.skipped_in_a_row, "skipped_total": self.skipped_total}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on counting from there, from 0 where an older state has no such counter; and :meth:`forget`."""
        for name, counter in self.state_dict().items():
            counter.fill_(state.get(name, 0))
        self.forget()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is counted within it does not count."""
        everything = (*self.state_dict().values(), *self.first.values())
        before = [kept.clone() for kept in everything]
        try:
            yield
        finally:
            for kept, value in zip(everything, before, strict=True):
                kept.copy_(value)


def health(total: Tensor, skip: Tensor) -> dict[str, Tensor]:
    """Metrics of an update that minimised ``total`` and was skipped where ``skip`` is 1; averages leave NaN out."""
    return {"health/nonfinite_loss": (~total.isfinite()).float(), "health/skipped_update": skip}


def masked(data: Mapping[str, Tensor], held: Tensor) -> dict[str, Tensor]:
    """``data``, key to ``(*held.shape, ...)``, with zeros where ``held``, bool, is false; and ``held`` itself."""
    lead = held.shape
    shaped = {key: held.view(*lead, *[1] * (value.ndim - held.ndim)) for key, value in data.items()}
    return {key: torch.where(shaped[key], value, torch.zeros_like(value)) for key, value in data.items()} | {
        "held": held
    }


def held_rows(batch: Mapping[str, Tensor], keys: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The rows of ``batch`` that are there in full, of ``keys`` alone, on ``device``.

    Raises:
        ValueError: a key is missing, or no row is there.
    """
    if missing := [key for key in keys if key not in batch]:
        raise ValueError(f"the batch has no {missing[0]!r}: expected what offending_batch() gives")
    chosen = {key: batch[key].to(device) for key in keys}
    if "held" in batch:
        rows = batch["held"].to(device).flatten(1).all(1) if batch["held"].ndim > 1 else batch["held"].to(device)
        if not bool(rows.any()):
            raise ValueError("nothing of the batch is held any more: newer steps have taken its place")
        chosen = {key: value[rows] for key, value in chosen.items()}
    return chosen


def inspect(
    losses: Mapping[str, Tensor], total: Tensor, module: nn.Module, data: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Where the numbers of an update are not finite; no gradient is left behind.

    Args:
        losses: by name, 0-dim.
        total: what is minimised.
        module: whose parameters have the gradients.
        data: what the losses were computed from.

    Returns:
        0-dim tensors: ``nonfinite/<key>``, how many numbers of ``data`` are not finite; ``loss/<name>`` and
        ``loss/total``; ``grad_norm/<name of parameter>``, 0 where there is no gradient.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    zero = torch.zeros((), device=total.device)
    return (
        {f"nonfinite/{key}": (~value.isfinite()).sum() for key, value in data.items()}
        | {f"loss/{name}": loss.detach() for name, loss in losses.items()}
        | {"loss/total": total.detach()}
        | {
            f"grad_norm/{name}": zero if grad is None else torch.linalg.vector_norm(grad)
            for name, grad in zip(trained, grads, strict=True)
        }
    )
