"""Updates whose numbers are not finite: nothing that lasts changes, they are counted, and their batch can be seen."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.ppo import PPO

Make = Callable[..., Any]
NAN, INF = float("nan"), float("inf")
STEP, WORLD = 7, 1  # where numbers are poisoned; every update of a case sees it


def bits(x: Tensor) -> Tensor:
    """A copy to compare bit for bit, in which a NaN equals itself."""
    kinds = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return x.detach().clone().view(kinds.get(x.dtype, x.dtype))


def lasting(agent: DreamerV3 | PPO) -> dict[str, Tensor]:
    """Everything that an update may change, but for what is drawn at random and the counters."""
    if isinstance(agent, DreamerV3):
        found = agent.modules.state_dict() | {f"memory {key}": ring for key, ring in agent.replay.storage.items()}
    else:
        found = agent.networks.state_dict() | {f"memory {key}": ring for key, ring in agent.rollout.storage.items()}
        found |= {"rate": agent.learning_rate, "stopped": agent.stopped}
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
            worlds, starts = (torch.tensor(x, device=self.agent.device) for x in ([0, 1, 2, 1], [1, 3, 10, 2]))
            self.agent.replay.draw = lambda batch: (worlds, starts)
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

    def case(**options: Any) -> Case:
        return Case(request.param, make, play, **options)

    return case


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
    return dict((agent.modules if isinstance(agent, DreamerV3) else agent.networks).named_parameters())


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
    """Neither of them, whatever it is compared with; and the rate stays even where it is out of its range."""
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


def test_the_count_is_part_of_the_state_which_may_lack_it(make_case: Make) -> None:
    case, other = make_case(), make_case()
    for _ in range(4):
        case.overflow()
    file = io.BytesIO()
    torch.save(case.agent.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    counters = other.agent.skipped_in_a_row, other.agent.skipped_total
    addresses = [counter.data_ptr() for counter in counters]
    other.agent.load_state_dict(state)
    assert [counter.item() for counter in counters] == [4, 4]
    for name in ("skipped_in_a_row", "skipped_total"):
        del state[name]
    other.agent.load_state_dict(state)
    assert [counter.item() for counter in counters] == [0, 0]
    counters = other.agent.skipped_in_a_row, other.agent.skipped_total
    assert [counter.data_ptr() for counter in counters] == addresses


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
    seen = case.agent.offending_batch()
    good = case.put("state", NAN)  # which warming up sees
    case.agent.warm_up()
    assert case.agent.skipped_in_a_row.item() == case.agent.skipped_total.item() == 1
    case.put("state", good)
    assert_same(case.agent.offending_batch(), seen)
    case.agent.update()
    case.agent.warm_up()
    assert (case.agent.skipped_in_a_row.item(), case.agent.skipped_total.item()) == (0, 1)


# --- the batch --------------------------------------------------------------------------------------------------------


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert {key for key in one if not torch.equal(bits(one[key]), bits(other[key]))} == set()


def test_the_batch_of_the_first_skipped_update_of_a_streak(make_case: Make) -> None:
    """Of this streak, not of the last one, nor of its later updates."""
    case = make_case()
    agent, seen = case.agent, []
    spied = agent.losses

    def losses(data: dict[str, Tensor], *judged: Tensor) -> Any:
        seen.append({key: value.clone() for key, value in data.items()})
        return spied(data, *judged)

    agent.losses = losses
    if case.kind == "dreamer_v3":
        draws = iter(torch.tensor(x) for x in ([1, 4, 2, 0], [3, 3, 3, 3], [5, 1, 2, 2], [0, 0, 0, 0], [1, 1, 1, 1]))
        agent.replay.draw = lambda batch: (torch.arange(4) % 3, next(draws))
    assert agent.offending_batch() == {}
    case.overflow()
    assert_holds(agent.offending_batch(), seen[0])
    agent.update()
    assert agent.offending_batch() == {}
    for _ in range(2):
        case.overflow()
        assert_holds(agent.offending_batch(), seen[2])
    assert not torch.equal(seen[2]["state"], seen[3]["state"])
    if case.kind == "ppo":
        for _ in range(2):  # more rollouts
            case.collect()
            for _ in range(4):
                case.overflow()
                assert_holds(agent.offending_batch(), seen[2])
        case.collect()
        agent.update()
        case.overflow()
        assert_holds(agent.offending_batch(), seen[-1])


def assert_holds(batch: dict[str, Tensor], seen: dict[str, Tensor]) -> None:
    assert bool(batch["held"].all())
    assert_same({key: batch[key] for key in seen}, seen)


def test_steps_that_the_ring_has_lost_are_named(make_agent: Make, play: Make) -> None:
    case = Case("dreamer_v3", make_agent, play, replay_size=3 * 20)
    case.put("reward", NAN)
    case.agent.update()
    case.collect()  # of 24 steps the ring has lost 4
    batch = case.agent.offending_batch()
    assert batch["worlds"].tolist() == [0, 1, 2, 1]
    assert torch.equal(batch["held"], batch["times"] >= 4)
    assert batch["times"][:, 0].tolist() == [1, 3, 10, 2]
    assert not batch["state"][0, :3].any()
    assert bool(batch["state"][0, 3].any())
    found = case.agent.examine(batch)  # of the one sequence that is whole
    assert found["loss/total"].isfinite()
    case.collect()  # and of 36 steps 16
    assert case.agent.offending_batch()["held"].sum(1).tolist() == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="nothing of the batch is held any more"):
        case.agent.examine(case.agent.offending_batch())


def test_a_streak_that_began_before_a_checkpoint_has_no_batch(make_case: Make) -> None:
    case, other = make_case(), make_case()
    for _ in range(4):
        case.overflow()
        other.overflow()  # whose own batch is not the one that is loaded
    other.agent.load_state_dict(case.agent.state_dict())
    for _ in range(2):
        batch = other.agent.offending_batch()
        assert not any(bool(batch[key].any()) for key in ("held", "state", "value" if case.kind == "ppo" else "deter"))
        if case.kind == "ppo":
            other.collect()
            for _ in range(4):
                other.overflow()


@pytest.mark.parametrize("key", ["reward", "state"])
def test_a_person_sees_what_is_not_finite_in_a_dump(key: str, make_case: Make) -> None:
    """With another agent that has loaded the checkpoint and the batch; neither agent changes, nor any random state."""
    case, other = make_case(), make_case(seed=4)
    if case.kind == "ppo":
        case.advance()
    other.agent.load_state_dict(case.agent.state_dict())
    clean = dict(case.agent.examine(_as_batch(case)))
    assert all(bool(value.isfinite()) for value in clean.values())
    case.put(key, NAN)
    case.agent.update()
    file = io.BytesIO()
    torch.save(case.agent.offending_batch(), file)
    batch = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    before, random, gradients = lasting(other.agent), torch.get_rng_state(), _gradients(other.agent)
    found = other.agent.examine(batch)
    assert changed(other.agent, before) == set()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(gradients, _gradients(other.agent), strict=True))
    assert found.keys() == clean.keys()
    assert {value.shape for value in found.values()} == {()}
    names = {f"grad_norm/{name}" for name, p in _parameters(other.agent).items() if p.requires_grad}
    assert names == {name for name in found if name.startswith("grad_norm/")}
    # PPO's rewards have become advantages, and the NaN has spread to the steps before it.
    assert found["nonfinite/advantage" if (case.kind, key) == ("ppo", "reward") else f"nonfinite/{key}"] >= 1
    bad = {name for name, value in found.items() if not value.isfinite()}
    assert "loss/total" in bad
    if case.kind == "ppo":
        assert "grad_norm/value_head.0.weight" in bad
    elif key == "reward":
        # What a NaN reward cannot reach: the decoder, and the actor, which is taught in imagination.
        assert {"loss/reward", "loss/replay_value", "grad_norm/world_model.reward.net.1.weight"} <= bad
        assert not {name for name in bad if "decoder" in name or "policy" in name}
    else:
        assert "loss/state" in bad
    with pytest.raises(ValueError, match="the batch has no 'state'"):
        other.agent.examine({name: value for name, value in batch.items() if name != "state"})


def _as_batch(case: Case) -> dict[str, Tensor]:
    case.overflow()
    batch = case.agent.offending_batch()
    case.agent.update()
    return batch


def _gradients(agent: DreamerV3 | PPO) -> list[Tensor]:
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in _parameters(agent).values()]
