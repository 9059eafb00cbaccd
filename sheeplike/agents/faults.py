"""Updates that were skipped because a number in them was not finite: counted, and looked into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
        first: as ``names``: what the first update of the present streak was given; -1 where that is not known.
    """

    def __init__(self, device: torch.device, **names: Tensor) -> None:
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.first = {name: torch.full_like(given, -1) for name, given in names.items()}

    def count(self, finite: Tensor, **given: Tensor) -> Tensor:
        """Take in an update: whether its numbers were finite, 0-dim bool, and what named its batch.

        Returns:
            0-dim float32, 1 where it is to be skipped: an optimizer's ``found_inf``.
        """
        begins = ~finite & (self.skipped_in_a_row == 0)
        for name, kept in self.first.items():
            kept.copy_(torch.where(begins, given[name], kept))
        self.skipped_in_a_row.add_(1).mul_((~finite).long())
        return (~finite).float()

    def load(self, skipped_in_a_row: Tensor | int) -> None:
        """Go on counting from there. What the streak began with is not known any more."""
        self.skipped_in_a_row.fill_(skipped_in_a_row)
        for kept in self.first.values():
            kept.fill_(-1)

    def snapshot(self) -> list[Tensor]:
        """A copy of everything, for :meth:`restore`."""
        return [kept.clone() for kept in (self.skipped_in_a_row, *self.first.values())]

    def restore(self, snapshot: list[Tensor]) -> None:
        """As it was at :meth:`snapshot`."""
        for kept, value in zip((self.skipped_in_a_row, *self.first.values()), snapshot, strict=True):
            kept.copy_(value)


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
