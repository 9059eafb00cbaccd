"""Updates whose numbers are not finite: nothing that lasts changes, and they are counted; what an update saw."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.ppo import PPO

Make = Callable[..., Any]
NAN, INF = float("nan"), float("inf")
STEP, WORLD = 7, 1


def bits(x: Tensor) -> Tensor:
    """A copy to compare bit for bit, in which a NaN equals itself."""
    kinds = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return x.detach().clone().view(kinds.get(x.dtype, x.dtype))


def lasting(agent: DreamerV3 | PPO) -> dict[str, Tensor]:
    """Everything that an update may change, but for what is drawn at random and the counters."""
    if isinstance(agent, DreamerV3):
        found = agent.networks.state_dict() | {f"memory {key}": ring for key, ring in agent.replay.storage.items()}
    else:
        found = agent.networks.state_dict() | {f"memory {key}": ring for key, ring in agent.rollout.storage.items()}
        found |= {"rate": agent.optimizer.learning_rate(), "stopped": agent.stopped}
    for n, state in enumerate(agent.optimizer.state.values()):
        found |= {f"optimizer {n} {name}": value for name, value in state.items()}
    return {name: bits(value) for name, value in found.items()}


def changed(agent: DreamerV3 | PPO, before: dict[str, Tensor]) -> set[str]:
    """Names of what is not what it was. Adam's moments begin as zeros with the first update."""
    return {
        name
        for name, value in lasting(agent).items()
        if not torch.equal(value, before.get(name, torch.zeros_like(value)))
    }


class Case:
    """A small agent with something to learn from."""

    def __init__(self, kind: str, make: Make, play: Make, **options: Any) -> None:
        self.kind, self.play = kind, play
        torch.manual_seed(3)
        if kind == "ppo":
            self.agent = make(**({"minibatches": 1, "epochs": 4, "learning_rate": 1e-2} | options))
        else:
            self.agent = make(learning_rate=1e-3, **options)
            envs, starts = (torch.tensor(x, device=self.agent.device) for x in ([0, 1, 2, 1], [1, 3, 10, 2]))
            self.agent.replay.draw = lambda batch: (envs, starts)
        self.player = self.agent.player(3)
        self.steps: list[Any] = []
        self.collect()

    def collect(self) -> None:
        """Ten more steps of every world; of PPO, what completes its rollout."""
        steps = 9 - self.agent.rollout.steps if self.kind == "ppo" else 12
        begin = self.steps[-1].is_last if self.steps else None
        ends = {"last": {(2, 0)}, "terminal": {(5, 2)}, "begin": begin, "player": self.player}
        self.steps += self.play(self.agent, steps, seed=len(self.steps), **ends)

    def advance(self) -> None:
        """Learn: one update, or all of a rollout and the next one."""
        for _ in range(4 if self.kind == "ppo" else 1):
            self.agent.update()
        if self.kind == "ppo":
            self.collect()

    def put(self, key: str, value: float | Tensor) -> Tensor:
        """Write a number of one step that every update sees; returns what it was."""
        agent = self.agent
        ring = agent.rollout.trajectory(key) if self.kind == "ppo" else agent.replay.storage[key]
        place = ring[STEP, WORLD].view(-1)[:1]
        was = place.clone()
        place.copy_(torch.as_tensor(value))
        if self.kind == "ppo":
            agent._prepare()
        return was

    def parameter(self) -> torch.nn.Parameter:
        return (
            self.agent.networks.value_head[0].bias if self.kind == "ppo" else self.agent.actor_critic.value.net[1].bias
        )

    def overflow(self, value: float = INF) -> dict[str, Tensor]:
        """An update in which the gradient of one parameter is ``value``."""
        handle = self.parameter().register_hook(lambda g: torch.full_like(g, value))
        metrics = self.agent.update()
        handle.remove()
        return metrics


@pytest.fixture(params=["dreamer_v3", "ppo"])
def make_case(request: pytest.FixtureRequest, make_agent: Make, make_ppo: Make, play: Make) -> Make:
    """Builds a :class:`Case`."""
    make = make_ppo if request.param == "ppo" else make_agent

    return partial(Case, kind=request.param, make=make, play=play)


def on(device: str) -> dict[str, str]:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return {"device": device}


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


# --- nothing changes --------------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("begun", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize(("key", "value"), [("reward", NAN), ("reward", INF), ("reward", -INF), ("state", NAN)])
def test_one_number_in_a_batch_is_enough_to_skip_and_without_it_learning_goes_on(
    key: str, value: float, begun: bool, device: str, make_case: Make, no_host_reads: Callable[[], Any]
) -> None:
    case = make_case(**on(device))
    agent = case.agent
    if begun:
        case.advance()
    good = case.put(key, value)
    before, address = lasting(agent), agent.skipped_in_a_row.data_ptr()
    for count in (1, 2):
        if device == "cpu":
            with no_host_reads():
                metrics = agent.update()
        else:
            metrics = agent.update()
        assert metrics["health/skipped_update"] == 1
        # The reward head's last bin takes any number.
        hidden = case.kind == "dreamer_v3" and abs(value) == INF
        assert metrics["health/nonfinite_loss"] == (not hidden)
        assert agent.skipped_in_a_row.item() == count
        assert changed(agent, before) == set()
    case.put(key, good)
    assert agent.update()["health/skipped_update"] == 0
    assert agent.skipped_in_a_row.item() == 0
    assert agent.skipped_in_a_row.data_ptr() == address
    moved = changed(agent, before)
    assert {name for name, p in _parameters(agent).items() if p.grad is not None and p.grad.any()} <= moved
    assert all(bool(value.isfinite().all()) for value in _parameters(agent).values())


def _parameters(agent: DreamerV3 | PPO) -> dict[str, torch.nn.Parameter]:
    return dict(agent.networks.named_parameters())


@DEVICES
@pytest.mark.parametrize("value", [NAN, INF])
def test_one_gradient_is_enough_to_skip(value: float, device: str, make_case: Make) -> None:
    """The loss is finite; return scale and fresh latents were known before the gradient was."""
    case = make_case(**on(device))
    case.advance()
    before = lasting(case.agent)
    metrics = case.overflow(value)
    assert metrics["health/skipped_update"] == 1
    assert metrics["health/nonfinite_loss"] == 0
    assert changed(case.agent, before) == set()
    assert case.agent.update()["health/skipped_update"] == 0
    assert changed(case.agent, before)


def test_learning_goes_on_as_if_the_skipped_updates_had_not_been(make_case: Make) -> None:
    """Bit for bit, of parameters, moments, counters and latents, with the same random numbers."""
    outcomes = []
    for bad in (0, 1, 2):
        case = make_case()
        if bad == 2:
            case.put("state", case.put("state", NAN))
        for _ in range(bad):
            case.overflow()
        if case.kind == "ppo":
            case.agent.updates = 0  # the same order again
            case.agent.generator.manual_seed(5)
        torch.manual_seed(5)
        metrics = [case.agent.update() for _ in range(3)]
        outcomes.append((lasting(case.agent), metrics))
    for after, metrics in outcomes[1:]:
        assert all(torch.equal(value, outcomes[0][0][name]) for name, value in after.items())
        for a, b in zip(metrics, outcomes[0][1], strict=True):
            assert all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def test_a_divergence_that_is_no_number_moves_no_control(make_ppo: Make, play: Make) -> None:
    """Neither of them, in any comparison; and the rate stays even where it is out of its range."""
    for control in ("adaptive_lr", "early_stop"):
        for value in (NAN, -1000.0):
            case = Case("ppo", make_ppo, play, kl_control=control, kl_target=1e-6, learning_rate=0.5)
            case.put("log_prob", value)
            before = lasting(case.agent)
            metrics = case.agent.update()
            assert not metrics["ppo/approx_kl"].isfinite()
            assert metrics["ppo/skipped"] == metrics["health/skipped_update"] == 1
            assert changed(case.agent, before) == set()


def test_a_skip_for_the_divergence_is_no_fault(make_ppo: Make, play: Make) -> None:
    case = Case("ppo", make_ppo, play, kl_control="early_stop", kl_target=1e-6)
    case.overflow()
    case.agent.rollout.trajectory("log_prob")[:] -= 0.1
    metrics = case.agent.update()
    assert (metrics["ppo/skipped"], metrics["health/skipped_update"]) == (1, 0)
    assert case.agent.skipped_in_a_row.item() == 0
    assert case.agent.update()["health/skipped_update"] == 0
    assert case.agent.skipped_in_a_row.item() == 0
    assert case.overflow()["health/skipped_update"] == 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_running_norms_take_in_the_finite_vectors_alone(value: float, make_ppo: Make, play: Make) -> None:
    case = Case("ppo", make_ppo, play)
    case.put("state", value)
    seen = case.agent.rollout.trajectory("state")[:-1].flatten(0, 1).double().clone()
    for _ in range(4):
        case.agent.update()
    norm = case.agent.networks.policy_trunk.norms["state"]
    kept = seen[seen.isfinite().all(-1)]
    assert norm.count.item() == len(kept) == 23
    torch.testing.assert_close(norm.mean, kept.mean(0))
    torch.testing.assert_close(norm.square / norm.count, kept.var(0, correction=0))


# --- counted ----------------------------------------------------------------------------------------------------------


def test_the_counts_are_part_of_the_state_and_stay_where_they_are(make_case: Make) -> None:
    case, other = make_case(), make_case()
    for _ in range(4):
        case.overflow()
    counters = other.agent.skipped_in_a_row, other.agent.skipped_total
    addresses = [counter.data_ptr() for counter in counters]
    other.agent.load_state_dict(copied(case.agent.state_dict()))
    assert [counter.item() for counter in counters] == [4, 4]
    counters = other.agent.skipped_in_a_row, other.agent.skipped_total
    assert [counter.data_ptr() for counter in counters] == addresses


def copied(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def test_all_that_were_ever_skipped_are_counted(make_case: Make, no_host_reads: Callable[[], Any]) -> None:
    case, counts = make_case(), []
    total, address = case.agent.skipped_total, case.agent.skipped_total.data_ptr()
    for skipped in (True, True, False, True):
        if skipped:
            with no_host_reads():
                case.overflow()
        else:
            case.agent.update()
        counts.append((case.agent.skipped_in_a_row.item(), total.item()))
    assert counts == [(1, 1), (2, 2), (0, 2), (1, 3)]
    assert case.agent.skipped_total.data_ptr() == address


def test_warming_up_counts_nothing(make_case: Make) -> None:
    case = make_case()
    case.overflow()
    good = case.put("state", NAN)
    case.agent.warm_up()
    assert case.agent.skipped_in_a_row.item() == case.agent.skipped_total.item() == 1
    case.put("state", good)
    case.agent.update()
    case.agent.warm_up()
    assert (case.agent.skipped_in_a_row.item(), case.agent.skipped_total.item()) == (0, 1)


# --- the batch --------------------------------------------------------------------------------------------------------


def test_the_last_batch_is_what_the_last_update_saw(make_case: Make) -> None:
    """Also of an update that was skipped, after warming up, and where PPO's rollout has given way to the next one."""
    case = make_case(minibatches=2) if make_case.keywords["kind"] == "ppo" else make_case()
    agent, seen = case.agent, []
    losses = agent.losses

    def spy(data: dict[str, Tensor]) -> Any:
        seen.append({key: value.clone() for key, value in data.items()})
        return losses(data)

    agent.losses = spy
    if case.kind == "dreamer_v3":
        draws = iter(torch.tensor(x) for x in ([1, 4, 2, 0], [3, 3, 3, 3], [5, 1, 2, 2], [0, 0, 0, 0]))
        agent.replay.draw = lambda batch: (torch.arange(4) % 3, next(draws))
    assert agent.last_batch() == {}
    for count in range(8 if case.kind == "ppo" else 4):
        case.overflow() if count % 3 == 1 else agent.update()
        if count == 2:
            agent.warm_up()
            del seen[-2:]
        batch = agent.last_batch()
        assert copied(batch).keys() == batch.keys() == seen[-1].keys() | {"envs", "times"}
        latents = {"deter", "stoch"} if case.kind == "dreamer_v3" else set()  # the update has refreshed them
        for key in seen[-1].keys() - latents:
            assert torch.equal(batch[key], seen[-1][key]), key
        for row, (env, times) in enumerate(zip(batch["envs"].tolist(), batch["times"], strict=True)):
            rows = batch["state"][row].view(-1, 5)
            for time, state in zip(times.view(-1).tolist(), rows, strict=True):
                assert torch.equal(state, case.steps[time].obs["state"][env])
    if case.kind == "ppo":
        assert agent.updates == 0, "the rollout has given way"
    assert not torch.equal(seen[-1]["state"], seen[-2]["state"])


@pytest.mark.parametrize("key", ["state", "reward"])
def test_the_last_batch_shows_the_number_that_made_updates_be_skipped(key: str, make_case: Make) -> None:
    case = make_case()
    case.put(key, NAN)
    for _ in range(4):  # all of PPO's rollout
        case.agent.update()
    batch = copied(case.agent.last_batch())
    # PPO's rewards have become advantages, and the NaN has spread to the steps before it.
    bad = batch["advantage" if (case.kind, key) == ("ppo", "reward") else key].isnan()
    assert bad.any()
    row = bad.nonzero()[0].tolist()
    assert batch["envs"][row[0]] == WORLD
