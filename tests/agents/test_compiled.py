"""Compiled and captured, an agent does what it does eagerly; nothing is compiled anew once it has warmed up."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch._dynamo.exc import SkipFrame
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from sheeplike.agents.agent import Agent, Step
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.ppo import PPO
from sheeplike.nn.compilation import EAGER_CALLS, CannotCompile, Compilation, GraphedStep
from sheeplike.nn.patches import end_capture

# After some more, the values of the critic leave 0, and its largest bins, 4.85e8, amplify rounding errors.
UPDATES = 8
# Fused kernels round differently, and updates carry that on. Where an update is divided by the root mean square of
# its own gradient, a gradient of nearly nothing may even change its sign: so parameters are compared by their learning
# rates of distance, not one by one relative to themselves.
LOSSES = {"rtol": 2e-3, "atol": 2e-3}


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A compiler cache of this module's own: what is compiled here is compiled here."""
    # The C++ compiler takes most of the time, and what it optimizes is not the subject.
    quick = inductor_config.patch({"aot_inductor.debug_compile": True, "cpp.simdlen": 1})
    with pytest.MonkeyPatch.context() as patch, quick:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        torch.compiler.reset()
        # Compiled for one thread from the start: other numbers of threads would compile anew.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
    torch.compiler.reset()


def learn(agent: Agent, seed: int) -> list[dict[str, Tensor]]:
    """Updates with the random numbers of ``seed``, none of which may compile."""
    torch.manual_seed(seed)
    with torch.compiler.set_stance("fail_on_recompile"):
        return [{name: value.clone() for name, value in agent.update().items()} for _ in range(UPDATES)]


def assert_same_learning(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> None:
    for count, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(
                a[name].cpu(), b[name].cpu(), **LOSSES, msg=lambda text, n=name, c=count: f"{n}, update {c}: {text}"
            )


def assert_same_parameters(one: torch.nn.Module, other: torch.nn.Module, rate: float) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        away = (a.float().cpu() - b.float().cpu()).abs()
        assert away.mean() < 0.02 * rate * UPDATES, name
        assert away.max() < 2 * rate * UPDATES, name


RATE = 1e-3


TRACED = {"batch_length": 4, "imagination_length": 2}


# Compiling the networks of images takes minutes; everything else of the agent, one.
@pytest.fixture(
    scope="module",
    params=[
        TRACED,
        pytest.param({**TRACED}, marks=pytest.mark.slow),
        pytest.param({"cameras": ("front",)}, marks=pytest.mark.slow),
        pytest.param(
            {
                "cameras": {"front": (48, 48, 3), "wide": (48, 64, 1)},
                "vectors": {"state": 5, "hidden": 2},
                "observations": ("pixels/*", "state"),
                "targets": ("hidden",),
                "probes": ("hidden",),
                "actions": spaces.MultiDiscrete([2, 3], start=[0, -1]),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["traced", "vector", "pixels", "several of all"],
)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Keywords of an agent."""
    return request.param


def trace(compile: Callable, function: Callable, *, options: dict[str, Any], **given: Any) -> Callable:
    """Compile imagination; trace the rest, forwards and backwards, into what runs operation by operation."""
    how = {"options": options} if function.__name__ == "imagine_step" else {"backend": "aot_eager"}
    return compile(function, **given, **how)


@pytest.fixture(scope="module")
def dreamers(
    kind: dict[str, Any], make_agent: Callable[..., DreamerV3], play: Callable[..., list[Step]]
) -> list[DreamerV3]:
    """The same experience and the same parameters, eager and compiled; the compiled one has warmed up."""
    eager = make_agent(**kind, learning_rate=RATE)
    torch.manual_seed(3)
    play(eager, 40, last={(7, 0), (20, 1)}, terminal={(30, 2)})
    with pytest.MonkeyPatch.context() as patch:
        if kind is TRACED:
            patch.setattr(torch, "compile", functools.partial(trace, torch.compile))
        compiled = make_agent(**kind, learning_rate=RATE, compile="inductor")
    compiled.load_state_dict(copy.deepcopy(eager.state_dict()))
    compiled.warm_up()
    return [eager, compiled]


def test_updates_of_dreamer_are_those_of_the_eager_agent(dreamers: list[DreamerV3]) -> None:
    eager, compiled = dreamers
    assert compiled.compiled.mode == "inductor"
    compiled.load_state_dict(copy.deepcopy(eager.state_dict()))  # another test may have changed one
    assert_same_learning(*(learn(agent, seed=5) for agent in dreamers))
    assert_same_parameters(eager.networks, compiled.networks, RATE)
    # What was written back to the replay: bfloat16 of nearly the same numbers, and the same classes drawn.
    ours, theirs = (agent.replay.storage for agent in dreamers)
    torch.testing.assert_close(ours["deter"].float(), theirs["deter"].float(), rtol=0.02, atol=0.02)
    assert (ours["stoch"] == theirs["stoch"]).float().mean() > 0.98


def test_acting_can_be_traced_whole(dreamers: list[DreamerV3], play: Callable[..., list[Step]]) -> None:
    """Acting on a GPU, which compiles it, against plain acting."""
    traced = copy.deepcopy(dreamers[0])
    traced.networks._act = torch.compile(traced.networks._act, fullgraph=True, backend="eager")
    acted = []
    for agent in (dreamers[0], traced):
        torch.manual_seed(9)
        acted.append(play(agent, 12, last={(4, 1)}, seed=2))
    for one, other in zip(*acted, strict=True):
        torch.testing.assert_close(one.action, other.action, rtol=1e-4, atol=1e-4)
        assert torch.equal(one.extras["stoch"], other.extras["stoch"])


def test_what_is_rare_compiles_nothing(dreamers: list[DreamerV3], kind: dict[str, Any]) -> None:
    with torch.compiler.set_stance("fail_on_recompile"):
        _, predictions = dreamers[1].report()
    assert predictions.keys() == set(kind.get("cameras", ()))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(space, marks=pytest.mark.slow)
        for space in (spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([2, 3]))
    ],
    ids=["box", "several"],
)
def ppos(request: pytest.FixtureRequest, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> list[PPO]:
    """The same rollout and the same parameters, eager and compiled; the compiled one has warmed up."""
    options = {"cameras": ("front",), "frame_stack": 2, "learning_rate": RATE, "epochs": 4, "actions": request.param}
    agents = [make_ppo(**options), make_ppo(**options, compile="inductor")]
    agents[1].warm_up()
    for agent in agents:
        torch.manual_seed(4)
        fill(agent, last={(3, 1)}, terminal={(5, 0)})
    return agents


def test_updates_of_ppo_are_those_of_the_eager_agent(ppos: list[PPO]) -> None:
    assert ppos[1].compiled.mode == "inductor"
    ppos[1].load_state_dict(copy.deepcopy(ppos[0].state_dict()))
    assert_same_learning(*(learn(agent, seed=5) for agent in ppos))
    assert_same_parameters(ppos[0].networks, ppos[1].networks, RATE)


def numbers(agent: Agent) -> list[Tensor]:
    """A copy of what an update changes."""
    modules, memory = (agent.networks, agent.rollout) if isinstance(agent, PPO) else (agent.networks, agent.replay)
    state = [value for values in agent.optimizer.state.values() for value in values.values()]
    return [value.clone() for value in (*modules.state_dict().values(), *state, *memory.storage.values())]


def assert_skips(agent: Agent, *poison: tuple[str, float]) -> None:
    """NaN and infinity go through the fused kernels; a good update follows; nothing is compiled for it."""
    memory = agent.rollout if isinstance(agent, PPO) else agent.replay
    with torch.compiler.set_stance("fail_on_recompile"):
        for key, value in poison:
            good = memory.storage[key].clone()
            memory.storage[key].fill_(value)
            before = numbers(agent)
            for count in (1, 2):
                assert agent.update()["health/skipped_update"] == 1
                assert agent.skipped_in_a_row.item() == count
                for now, was in zip(numbers(agent), before, strict=True):
                    torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
            memory.storage[key].copy_(good)
            assert agent.update()["health/skipped_update"] == agent.skipped_in_a_row == 0
            assert any(not torch.equal(now, was) for now, was in zip(numbers(agent), before, strict=True))
        assert torch.stack([value.isfinite().all() for value in numbers(agent)]).all()


def test_a_compiled_update_of_dreamer_whose_numbers_are_not_finite_is_skipped(dreamers: list[DreamerV3]) -> None:
    assert_skips(dreamers[1], ("state", torch.nan), ("state", torch.inf), ("reward", torch.inf), ("reward", torch.nan))


def test_a_compiled_update_of_ppo_whose_numbers_are_not_finite_is_skipped(ppos: list[PPO]) -> None:
    assert_skips(ppos[1], ("state", torch.nan))


def test_an_unknown_mode_and_one_that_the_device_cannot_have_are_refused() -> None:
    with pytest.raises(AssertionError, match="fast"):
        Compilation("fast", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"compile=graph.*nearest: inductor"):
        Compilation("graph", torch.device("cpu"))


def test_without_a_compiler_auto_is_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Compilation("auto", torch.device("cpu")).mode == "inductor"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert Compilation("auto", torch.device("cpu")).mode == "off"
    (line,) = capsys.readouterr().err.splitlines()
    reason = "torch.compile needs a C++ compiler such as g++ (python -m sheeplike doctor says more)"
    assert line.startswith("sheeplike: ")
    assert reason in line
    with pytest.raises(ValueError, match=r"compile=inductor.*torch.compile.*nearest: off"):
        Compilation("inductor", torch.device("cpu"))


def test_without_a_compiler_a_gpu_still_has_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sheeplike.nn.compilation._missing_backend", lambda device: "torch.compile needs Triton")
    compilation = Compilation("auto", torch.device("cuda"))
    assert (compilation.fused, compilation.graphs) == (False, True)
    assert "torch.compile" in capsys.readouterr().err
    with pytest.raises(CannotCompile, match=r"compile=graph.*torch.compile.*Triton.*nearest: auto"):
        Compilation("graph", torch.device("cuda"))


def test_what_only_a_gpu_compiles_can_be_traced_whole(
    dreamers: list[DreamerV3], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sheeplike.agents.dreamer_v3.rssm.defers", lambda device: True)
    agent = copy.deepcopy(dreamers[0])
    world = agent.world_model
    names = ((world.encoder, "forward"), (world, "losses"), (world.rssm, "observe_all"), (agent.optimizer, "change"))
    for owner, name in names:
        setattr(owner, name, torch.compile(getattr(owner, name), fullgraph=True, backend="eager"))
    assert agent.update()["loss/total"].isfinite()


def test_without_pythons_headers_auto_is_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert Compilation("auto", torch.device("cpu")).mode == "off"
    assert "Python's headers" in capsys.readouterr().err


@pytest.fixture
def broken_compiler(tmp_path: Path) -> Iterator[None]:
    """A C++ compiler that is there and does not work."""
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'no space left for a.out' >&2\nexit 1\n")
    compiler.chmod(0o755)
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch({"cpp.cxx": (str(compiler),)}):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("broken_compiler")
def test_with_a_compiler_that_fails_auto_goes_on_eagerly_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    compilation = Compilation("auto", torch.device("cpu"))
    double, square = compilation.kernels(lambda x: 2 * x.tanh()), compilation.kernels(lambda x: x * x.sin())
    assert double(torch.zeros(3)).tolist() == [0.0] * 3
    assert square(torch.zeros(3)).tolist() == [0.0] * 3
    assert (compilation.fused, compilation.mode) == (False, "off")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sheeplike: kernels are not fused, which is slower: ")


@pytest.mark.usefixtures("broken_compiler")
def test_a_mode_asked_for_by_name_is_an_error_of_one_line_where_it_fails() -> None:
    double = Compilation("inductor", torch.device("cpu")).kernels(lambda x: 2 * x.tanh())
    with pytest.raises(CannotCompile, match=r"^compile=inductor: .*; nearest: off$"):
        double(torch.zeros(3))


def test_a_backward_pass_that_cannot_be_compiled_is_found_by_the_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compilation, weight, calls = Compilation("auto", torch.device("cpu")), torch.ones(3, requires_grad=True), []
    double = compilation.kernels(lambda x: 2 * x.tanh())
    missing = inductor_config.patch({"cpp.cxx": (str(tmp_path / "g++"),)})

    def step() -> None:
        calls.append(compilation.fused)
        weight.grad = None
        loss = double(weight).sum()
        with missing:
            loss.backward()

    with fresh_cache():
        compilation.warm_up(step)
    assert calls == [True, True, False, False]  # compiled, eagerly to see if the error is the step's own, and anew
    torch.testing.assert_close(weight.grad, 2 * (1 - torch.tanh(torch.ones(3)) ** 2))
    assert "kernels are not fused" in capsys.readouterr().err


def test_steps_go_on_without_graphs_where_a_capture_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compilation, ended = Compilation("auto", torch.device("cpu")), []
    compilation.graphs = True

    def capture(*_: object) -> None:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be …")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: "before")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(
        "sheeplike.nn.compilation.end_capture", lambda device, random, pool: ended.append((random, pool))
    )
    monkeypatch.setattr(GraphedStep, "_on_side_stream", lambda step, inputs: step.function(*inputs))
    monkeypatch.setattr(GraphedStep, "_capture", capture)
    total = torch.zeros(1)
    step, other = (compilation.step(lambda x: total.add_(x).clone()) for _ in range(2))
    seen = [function(torch.ones(1)).item() for _ in range(6) for function in (step, other)]
    assert seen == [float(count) for count in range(1, 13)]
    assert (ended, compilation.graphs, compilation.mode) == ([("before", "pool")], False, "inductor")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "sheeplike: no CUDA graphs, which is slower: operation not permitted when stream is capturing"
    )


def test_memory_that_is_short_in_a_capture_leaves_the_eager_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three eager calls have fitted; a graph needs memory of its own."""

    def capture(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr("sheeplike.nn.compilation.end_capture", lambda *_: None)
    monkeypatch.setattr(GraphedStep, "_on_side_stream", lambda step, inputs: step.function(*inputs))
    monkeypatch.setattr(GraphedStep, "_capture", capture)
    compilation, calls = Compilation("auto", torch.device("cpu")), []
    compilation.graphs = True
    step = compilation.step(lambda: calls.append(1))
    for _ in range(EAGER_CALLS + 2):
        step()
    assert (len(calls), compilation.graphs) == (EAGER_CALLS + 2, False)
    assert "out of memory" in capsys.readouterr().err


def test_a_pool_whose_capture_has_ended_is_not_released_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise RuntimeError("no allocation to this pool is under way")

    called, restored = [], []
    generator = SimpleNamespace(clone_state=lambda: "clone", graphsafe_set_state=len, set_state=restored.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda._utils, "_get_device_index", lambda device, optional: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    built = torch.backends.cuda.is_built()  # a build for CPUs has neither function
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", ended, raising=built)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: called.append(1), raising=built)
    end_capture(torch.device("cpu"), "before", "pool")
    assert (called, restored) == ([], ["before"])


@pytest.mark.parametrize("error", [SkipFrame("BF16 is not supported"), RuntimeError("out of resource: shared memory")])
def test_a_first_call_that_fails_in_any_way_goes_on_eagerly(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU before Ampere, Inductor refuses bf16; other kernels fail only when they are launched."""

    def backend(module: Any, inputs: Any, **options: Any) -> Callable:
        if isinstance(error, SkipFrame):
            raise error

        def launch(*_: Any) -> None:
            raise error

        return launch

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, fullgraph=True, dynamic=False, backend=backend))
    compilation = Compilation("auto", torch.device("cpu"))
    double = compilation.kernels(lambda x: 2 * x.tanh())
    assert double(torch.zeros(3)).tolist() == [0.0] * 3
    assert compilation.mode == "off"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_error_of_a_step_itself_is_raised_by_the_warm_up() -> None:
    compilation = Compilation("inductor", torch.device("cpu"))

    def step() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        compilation.warm_up(step)


def test_errors_of_a_function_itself_and_of_later_calls_are_raised() -> None:
    compilation = Compilation("auto", torch.device("cpu"))
    product = compilation.kernels(lambda x, y: x @ y)
    with pytest.raises(RuntimeError, match="shapes"):
        product(torch.zeros(2, 3), torch.zeros(2, 3))
    assert compilation.fused


def test_a_program_may_have_many_variants_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, fullgraph=True, dynamic=False, backend="eager"))
    compilation = Compilation("inductor", torch.device("cpu"))
    double = compilation.kernels(lambda x: 2 * x.tanh())
    for size in range(1, 13):
        double(torch.zeros(size))
    assert compilation.fused


def test_off_leaves_functions_as_they_are() -> None:
    plain = Compilation("off", torch.device("cpu"))
    assert plain.kernels(len) is len
    assert plain.step(len) is len


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestGraph:
    """On a GPU: a step as one CUDA graph."""

    def test_a_captured_step_does_what_the_function_does(self) -> None:
        device = torch.device("cuda")
        total, seen = torch.zeros(3, device=device), []

        def function(x: Tensor, more: dict[str, Tensor]) -> dict[str, Tensor]:
            total.add_(x + more["y"])
            return {"total": total * 1, "sum": total.sum(), "mean": total.mean()}

        step = GraphedStep(function, device)
        for count in range(1, 9):
            x = torch.full((3,), float(count), device=device)
            seen.append(step(x, {"y": torch.ones(3, device=device)}))
        assert step.captures == 1
        for count, out in enumerate(seen, 1):  # earlier results are not overwritten by later calls
            expected = count * (count + 1) / 2 + count
            assert out["total"].tolist() == [expected] * 3
            assert (out["sum"].item(), out["mean"].item()) == (3 * expected, expected)

    def test_random_numbers_are_those_of_the_plain_function(self) -> None:
        device = torch.device("cuda")

        def function(x: Tensor) -> Tensor:
            return x + torch.rand(4, device=device)

        drawn = []
        for step in (function, GraphedStep(function, device)):
            torch.manual_seed(1)
            drawn.append([step(torch.zeros(4, device=device)).tolist() for _ in range(8)])
        assert drawn[0] == drawn[1]

    def test_after_a_capture_that_failed_numbers_can_be_drawn_and_steps_go_on(self) -> None:
        device = torch.device("cuda")
        compilation = Compilation("auto", device)
        step = compilation.step(lambda: torch.rand(4, device=device) * torch.ones((), device=device).item())
        plain, drawn = torch.Generator(device).manual_seed(1), []
        torch.manual_seed(1)
        for _ in range(8):
            drawn.append(step().tolist())
        assert drawn == [torch.rand(4, device=device, generator=plain).tolist() for _ in range(8)]
        assert compilation.mode == "inductor"
        held = torch.cuda.memory_reserved(device)
        for _ in range(1000):  # torch's allocator does not believe that the capture is still going on
            step()
        assert torch.cuda.memory_reserved(device) == held

    def test_other_shapes_are_refused(self) -> None:
        step = GraphedStep(lambda x: x + 1, torch.device("cuda"))
        for _ in range(5):
            step(torch.zeros(2, device="cuda"))
        with pytest.raises(AssertionError):
            step(torch.zeros(3, device="cuda"))

    @pytest.mark.parametrize("kind", ["dreamer_v3", "ppo"])
    def test_ten_captured_updates_are_those_of_the_eager_agent(
        self,
        kind: str,
        make_agent: Callable[..., DreamerV3],
        make_ppo: Callable[..., PPO],
        play: Callable[..., list[Step]],
        fill: Callable[..., list[Step]],
    ) -> None:
        learned, modules = [], []
        for mode in ("off", "graph"):
            options: dict[str, Any] = {"device": "cuda", "compile": mode, "learning_rate": 1e-3, "cameras": ("front",)}
            torch.manual_seed(4)
            if kind == "ppo":
                agent = make_ppo(**options, epochs=3)
                agent.warm_up()
                torch.manual_seed(4)
                fill(agent, last={(3, 1)}, terminal={(5, 0)})
            else:
                agent = make_agent(**options)
                agent.warm_up()
                torch.manual_seed(4)
                play(agent, 40, last={(7, 0)}, terminal={(30, 2)})
            learned.append(learn(agent, seed=5))
            modules.append(agent.networks)
        assert agent._learn.captures == 1
        assert_same_learning(*learned)
        assert_same_parameters(*modules, rate=1e-3)

    @pytest.mark.parametrize("kind", ["dreamer_v3", "ppo"])
    def test_a_captured_update_whose_numbers_are_not_finite_is_skipped(
        self,
        kind: str,
        make_agent: Callable[..., DreamerV3],
        make_ppo: Callable[..., PPO],
        play: Callable[..., list[Step]],
        fill: Callable[..., list[Step]],
    ) -> None:
        """The same graph skips it, counts it where the count is, and makes the next good one."""
        if kind == "ppo":
            agent = make_ppo(device="cuda", compile="graph", epochs=3)
            fill(agent)
            memory = agent.rollout
        else:
            agent = make_agent(device="cuda", compile="graph")
            play(agent, 40)
            memory = agent.replay
        agent.warm_up()
        address = agent.skipped_in_a_row.data_ptr()
        good = memory.storage["state"].clone()
        assert agent.update()["health/skipped_update"] == 0
        memory.storage["state"].fill_(torch.nan)
        before = numbers(agent)
        for count in (1, 2, 3):
            assert agent.update()["health/skipped_update"] == 1
            assert agent.skipped_in_a_row.item() == count
        for now, was in zip(numbers(agent), before, strict=True):
            torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
        assert bool(agent.last_batch()["state"].isnan().all())
        memory.storage["state"].copy_(good)
        assert agent.update()["health/skipped_update"] == agent.skipped_in_a_row == 0
        assert bool(agent.last_batch()["state"].isfinite().all())
        assert any(not torch.equal(now, was) for now, was in zip(numbers(agent), before, strict=True))
        assert agent.skipped_in_a_row.data_ptr() == address
        assert agent._learn.captures == 1

    def test_an_update_is_a_handful_of_launches(
        self, make_agent: Callable[..., DreamerV3], play: Callable[..., list[Step]]
    ) -> None:
        agent = make_agent(device="cuda", compile="graph", cameras=("front",))
        play(agent, 40)
        agent.warm_up()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(4):
                agent.update()
            torch.cuda.synchronize()
        calls = {event.key: event.count for event in profiler.key_averages() if "aunch" in event.key}
        assert sum(count for name, count in calls.items() if "GraphLaunch" in name) <= 5 * 4, calls
        assert agent._learn.captures == 1

    def test_a_checkpoint_is_loaded_without_a_new_capture(
        self, make_agent: Callable[..., DreamerV3], play: Callable[..., list[Step]]
    ) -> None:
        agents = [make_agent(device="cuda", compile="graph", learning_rate=1e-3, seed=seed) for seed in (0, 1)]
        for agent in agents:
            play(agent, 40)
            agent.warm_up()
        agents[1].load_state_dict(copy.deepcopy(agents[0].state_dict()))
        assert_same_learning(*(learn(agent, seed=5) for agent in agents))
        assert [agent._learn.captures for agent in agents] == [1, 1]
