"""LaProp with adaptive gradient clipping, step by step against a float64 reference."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from sheeplike.nn.optimizers import LaProp, RestoredInPlace, adam, update_slow


class Reference:
    """The update rule of one tensor in float64, written from its definition, with loops over nothing but steps."""

    def __init__(self, value: np.ndarray, *, lr: float, warmup: int, agc: float = 0.3) -> None:
        self.value = value.astype(np.float64)
        self.lr, self.warmup, self.agc = lr, warmup, agc
        self.second = np.zeros_like(self.value)
        self.first = np.zeros_like(self.value)
        self.count = 0
        self.clipped: list[bool] = []

    def step(self, gradient: np.ndarray) -> None:
        g = gradient.astype(np.float64)
        norm, limit = np.sqrt((g**2).sum()), self.agc * max(1e-3, np.sqrt((self.value**2).sum()))
        self.clipped.append(norm > limit)
        if norm > limit:
            g = g * (limit / norm)
        lr = self.lr * min(1.0, self.count / self.warmup) if self.warmup else self.lr
        self.count += 1
        self.second = 0.999 * self.second + 0.001 * g**2
        normalised = g / (np.sqrt(self.second / (1 - 0.999**self.count)) + 1e-20)
        self.first = 0.9 * self.first + 0.1 * normalised
        self.value = self.value - lr * self.first / (1 - 0.9**self.count)


def make(params: list[nn.Parameter], lr: float, *, warmup: int) -> LaProp:
    return LaProp(params, lr, betas=(0.9, 0.999), eps=1e-20, agc=0.3, warmup=warmup)


def tensors(seed: int = 0) -> list[np.ndarray]:
    """A matrix, a bias that starts at zero, a norm scale, a 3-D block kernel."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((4, 3)), np.zeros(4), np.ones(5), 0.1 * rng.standard_normal((2, 3, 2))]


def gradients(step: int) -> list[np.ndarray]:
    """Uneven in size, so that clipping bites the last two of them in some steps and never the first."""
    rng = np.random.default_rng(100 + step)
    sizes = (0.05, (1e-5, 0.3, 2e-2)[step % 3], (0.01, 30.0, 0.3)[step % 3], 50.0 ** (step % 3 - 1))
    return [s * rng.standard_normal(v.shape) for s, v in zip(sizes, tensors(), strict=True)]


def run(warmup: int, steps: int, lr: float = 0.01) -> tuple[list[nn.Parameter], list[Reference], LaProp]:
    params = [nn.Parameter(torch.tensor(v, dtype=torch.float32)) for v in tensors()]
    references = [Reference(v.astype(np.float32), lr=lr, warmup=warmup) for v in tensors()]
    optimizer = make(params, lr, warmup=warmup)
    for step in range(steps):
        for p, reference, g in zip(params, references, gradients(step), strict=True):
            p.grad = torch.tensor(g, dtype=torch.float32)
            reference.step(g.astype(np.float32))
        optimizer.step()
    return params, references, optimizer


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 3), (4, 3), (4, 9), (1000, 5)])
def test_steps_follow_the_float64_reference(warmup: int, steps: int) -> None:
    params, references, _ = run(warmup, steps)
    for p, reference, start in zip(params, references, tensors(), strict=True):
        moved, expected = p.detach().double().numpy() - start, reference.value - start
        np.testing.assert_allclose(moved, expected, rtol=2e-3, atol=5e-7)


def test_the_fixture_clips_some_tensors_in_some_steps_and_others_never() -> None:
    _, references, _ = run(0, 3)
    assert [any(r.clipped) for r in references] == [False, True, True, True]
    assert not all(references[1].clipped)
    assert not all(references[2].clipped)


def test_clipping_is_per_tensor_and_bites_a_zero_bias_at_its_smallest_norm() -> None:
    """A gradient of norm 3 on a zero bias is clipped to 0.3 * 1e-3; the second moment keeps the clipped gradient."""
    bias, weight = nn.Parameter(torch.zeros(9)), nn.Parameter(torch.ones(9))
    bias.grad, weight.grad = torch.ones(9), torch.full((9,), 0.1)
    optimizer = make([weight, bias], 0.1, warmup=0)
    optimizer.step()
    np.testing.assert_allclose(optimizer.state[bias]["square"], 0.001 * 1e-4**2, rtol=1e-4)
    # Norm 0.3 is below 0.3 * 3: untouched, although the other tensor was clipped.
    np.testing.assert_allclose(optimizer.state[weight]["square"], 0.001 * 0.1**2, rtol=1e-4)


def test_first_update_of_a_warm_up_moves_nothing_but_fills_the_moments() -> None:
    params, _, optimizer = run(4, 1)
    for p, start in zip(params, tensors(), strict=True):
        assert torch.equal(p.detach(), torch.tensor(start, dtype=torch.float32))
        assert bool(optimizer.state[p]["momentum"].any())


@pytest.mark.parametrize(
    ("done", "expected"), [(0, 0.0), (1, 4e-8), (250, 1e-5), (999, 3.996e-5), (1000, 4e-5), (5000, 4e-5)]
)
def test_learning_rate_rises_linearly_over_a_thousand_updates_then_stays(done: int, expected: float) -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = make([p], 4e-5, warmup=1000)
    optimizer.state[p]["step"].fill_(done)
    assert float(optimizer.learning_rate()) == pytest.approx(expected, rel=1e-5, abs=1e-15)


@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1e-1])
def test_updates_do_not_depend_on_the_scale_of_the_gradient(factor: float) -> None:
    moved = []
    for scale in (1.0, factor):
        p = nn.Parameter(torch.ones(6))
        optimizer = make([p], 0.01, warmup=0)
        for step in range(3):
            p.grad = scale * torch.tensor(np.random.default_rng(step).uniform(-0.2, 0.2, 6), dtype=torch.float32)
            optimizer.step()
        moved.append(p.detach() - 1)
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-3)


def test_learning_rate_multiplies_after_the_momentum() -> None:
    """Were the rate folded into the momentum, a rate of zero in the first update would also erase its momentum."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = make([p], 1.0, warmup=1)
    for _ in range(2):
        p.grad = torch.full((1,), 1e-5)
        optimizer.step()
    assert p.item() == pytest.approx(-1.0, rel=1e-3)


def test_zero_gradients_move_nothing_and_stay_finite() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = make([p], 0.1, warmup=0)
    p.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3))


def test_a_parameter_without_gradient_is_left_alone() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = make(params, 0.1, warmup=0)
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(params[1].detach(), torch.ones(2))
    assert not torch.equal(params[0].detach(), torch.ones(2))


def test_moments_stay_float32() -> None:
    _, _, optimizer = run(0, 1)
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}


def test_state_round_trip_continues_alike() -> None:
    params, _, optimizer = run(4, 3)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    other = make(copies, 0.01, warmup=4)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for group in (params, copies):
            for p, g in zip(group, gradients(step), strict=True):
                p.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step()
        other.step()
    for p, twin in zip(params, copies, strict=True):
        assert torch.equal(p, twin)


def test_adam_keeps_no_memory_of_what_it_loads() -> None:
    """Its fused step writes as many numbers as a parameter has, not as a moment that was loaded says of itself."""
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = adam([p], 0.1, eps=1e-8)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.full((1,), 5.0).expand(3, 2)
    saved["param_groups"][0]["lr"] = torch.tensor(0.5)
    optimizer.load_state_dict(saved)
    loaded = optimizer.state[p]["exp_avg"]
    assert loaded.untyped_storage().nbytes() == p.untyped_storage().nbytes()
    assert torch.equal(loaded, torch.full((3, 2), 5.0))
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    for wrong in (torch.zeros(1), "x"):
        saved["state"][0]["exp_avg_sq"] = wrong
        with pytest.raises(ValueError, match="exp_avg_sq"):
            optimizer.load_state_dict(saved)


def test_squares_and_counters_are_not_negative() -> None:
    p = nn.Parameter(torch.ones(3))
    for optimizer, square in ((adam([p], 0.1, eps=1e-8), "exp_avg_sq"), (make([p], 0.1, warmup=0), "square")):
        for name in (square, "step"):
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][0][name] -= 1
            with pytest.raises(ValueError, match=str(name)):
                optimizer.load_state_dict(saved)


def test_the_state_of_an_optimizer_of_ones_own_may_be_negative() -> None:
    class Heavy(RestoredInPlace):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"momentum_buffer": torch.full_like(p, -2.0)}

    first, second = (Heavy([nn.Parameter(torch.ones(3))]) for _ in range(2))
    second.param_groups[0]["params"][0].data.zero_()
    second.state[second.param_groups[0]["params"][0]]["momentum_buffer"].zero_()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.state[second.param_groups[0]["params"][0]]["momentum_buffer"].tolist() == [-2.0] * 3


def test_update_slow_moves_a_fraction_in_place() -> None:
    slow, fast = nn.Linear(2, 2), nn.Linear(2, 2)
    before = {name: p.detach().double().clone() for name, p in slow.named_parameters()}
    memory = slow.weight.data_ptr()
    update_slow(slow, fast, 0.02)
    for name, p in slow.named_parameters():
        expected = 0.98 * before[name] + 0.02 * dict(fast.named_parameters())[name].detach().double()
        np.testing.assert_allclose(p.detach(), expected, rtol=1e-6, atol=1e-7)
    assert slow.weight.data_ptr() == memory


# --- steps that are skipped -------------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().view(torch.int32)


def taught(steps: int, found_inf: list[float | None], bad: float = float("nan")) -> tuple[list[nn.Parameter], LaProp]:
    """Steps, each told what of ``found_inf`` says; where that is 1, one gradient is ``bad`` here and there."""
    params = [nn.Parameter(torch.tensor(v, dtype=torch.float32)) for v in tensors()]
    params[1].data.mul_(-1.0)  # zeros with a sign
    optimizer, good = make(params, 0.01, warmup=2), 0
    for found in found_inf:
        for n, (p, g) in enumerate(zip(params, gradients(good), strict=True)):
            p.grad = torch.tensor(g, dtype=torch.float32)
            if found == 1:
                p.grad.view(-1)[n % 2] = bad
        good += found != 1
        optimizer.found_inf = None if found is None else torch.tensor(found)
        optimizer.step()
    assert good == steps
    return params, optimizer


def state_bits(params: list[nn.Parameter], optimizer: LaProp) -> list[torch.Tensor]:
    return [bits(x) for p in params for x in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1.0])
@pytest.mark.parametrize(
    ("plain", "told"),
    [
        ([], [1.0]),
        ([None], [1.0, 1.0, 0.0]),
        ([None] * 5, [0.0] * 5),
        ([None] * 5, [0.0, 1.0, 0.0, None, 1.0, 1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_a_step_that_is_told_to_be_skipped_changes_no_bit_and_others_none_of_theirs(
    plain: list[None], told: list[float | None], bad: float
) -> None:
    found, expected = taught(len(plain), told, bad), taught(len(plain), plain)
    for ours, theirs in zip(state_bits(*found), state_bits(*expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_step_traced_as_a_whole_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [0.0, 1.0, 0.0, None, 0.0]
    expected = taught(4, told)
    monkeypatch.setattr(LaProp, "change", torch.compile(LaProp.change, fullgraph=True, backend="aot_eager"))
    for ours, theirs in zip(state_bits(*taught(4, told)), state_bits(*expected), strict=True):
        assert torch.equal(ours, theirs)


def test_update_slow_moves_nothing_when_told() -> None:
    torch.manual_seed(0)
    slow, fast = nn.Linear(3, 2), nn.Linear(3, 2)
    slow.bias.data.fill_(-0.0)
    plain = copy.deepcopy(slow)
    before = [bits(p) for p in slow.parameters()]
    update_slow(slow, fast, 0.02, torch.tensor(1.0))
    assert all(torch.equal(bits(p), was) for p, was in zip(slow.parameters(), before, strict=True))
    update_slow(slow, fast, 0.02, torch.tensor(0.0))
    update_slow(plain, fast, 0.02)
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(slow.parameters(), plain.parameters(), strict=True))
    assert not torch.equal(slow.weight, torch.zeros(2, 3))
