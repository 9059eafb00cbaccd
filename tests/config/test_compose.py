"""Composition of a command line, and the order in which its sources win."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sheeplike import host
from sheeplike.agents import registry
from sheeplike.config import compose
from sheeplike.config.compose import load_saved, parse
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import all_keys, to_data
from sheeplike.config.sources import CONFIGS, Sources
from sheeplike.envs import list_envs
from sheeplike.options import CommandError

JOB = ("exp=dreamer_v3", "env=franka_pick")
BUILT_IN = Sources()


def load(arguments, sources):
    return compose.load(arguments, sources).config


def paths(section: dict, prefix: str = "") -> set[str]:
    below = (paths(value, f"{prefix}{name}.") for name, value in section.items() if isinstance(value, dict))
    return {prefix + name for name in section}.union(*below)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def chosen(env: str) -> list[str]:
    """Overrides that choose a task; a family without a default needs to be told which of it."""
    id = {"gym": "CartPole-v1", "envpool": "Pong-v5", "playground": "CheetahRun"}.get(env)
    return [f"env={env}", *([f"env.id={id}"] if id else [])]


def place(config) -> str:
    """The directory of its runs, below ``logs/``."""
    return "/".join([config.env.name, *([config.env.id.replace("/", "_")] if config.env.id else [])])


@pytest.mark.parametrize(("seed", "found"), [([], "logs/x_0"), (["seed=3"], "logs/x_3")])
def test_a_value_names_another_key(seed, found):
    assert load([*JOB, *seed, "run_dir='logs/x_${seed}'"], BUILT_IN).run_dir == found


@pytest.mark.parametrize("env", BUILT_IN.choices("env"))
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_dreamer_v3_composes(env, profile):
    names = ("exp=dreamer_v3", *chosen(env), f"profile={profile}")
    config = load(names, BUILT_IN)
    assert (config.exp, config.env.name, config.profile) == ("dreamer_v3", env, profile)
    assert config.run_dir == f"logs/{place(config)}/dreamer_v3/seed_0"
    assert config.agent.size == {"cpu": "1m", "gpu": "12m"}[profile]
    a, n = config.agent, config.env.num_envs
    assert a.learning_starts == max(n * (a.batch_length + 1), a.batch_size * a.batch_length)
    assert load([*names, "agent.size=50m"], BUILT_IN).agent.widths.deter == 4096


@pytest.mark.parametrize("env", BUILT_IN.choices("env"))
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_dreamer_v3_proprio_has_the_published_numbers_everywhere(env, profile):
    config = load(["exp=dreamer_v3_proprio", *chosen(env), f"profile={profile}"], BUILT_IN)
    assert config.run_dir == f"logs/{place(config)}/dreamer_v3/dreamer_v3_proprio/seed_0"
    agent = config.agent
    assert (agent.size, agent.observations, config.env.num_envs) == ("1m", ("state",), 16)
    assert (agent.train_ratio, agent.batch_size, agent.batch_length) == (1024, 16, 64)
    assert (agent.learning_rate, agent.warmup) == (4e-5, 1000)
    assert (agent.representation, agent.reward_scaling, agent.entropy_scale) == ("reconstruction", 1, 3e-4)


@pytest.mark.parametrize(("profile", "representation"), [("cpu", "barlow"), ("gpu", "reconstruction")])
def test_the_pick_learns_without_reconstruction_on_a_cpu(profile, representation):
    config = load(["exp=dreamer_v3", "env=franka_pick", f"profile={profile}"], BUILT_IN)
    assert (config.agent.representation, config.agent.decoder) == (representation, True)


@pytest.mark.parametrize("env", BUILT_IN.choices("env"))
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_ppo_composes(env, profile):
    config = load(["exp=ppo", *chosen(env), f"profile={profile}"], BUILT_IN)
    assert (config.exp, config.env.name, config.profile, config.agent.name) == ("ppo", env, profile, "ppo")
    assert config.run_dir == f"logs/{place(config)}/ppo/seed_0"


def test_ppo_on_a_gpu_has_the_published_numbers():
    """MuJoCo Playground: 256 trajectories x 8 minibatches in 1024 worlds are two unrolls in each."""
    pick = load(["exp=ppo", "env=franka_pick", "profile=gpu"], BUILT_IN)
    balance = load(["exp=ppo", "env=cartpole_balance", "profile=gpu"], BUILT_IN)
    for config, unroll, discount, entropy in ((pick, 10, 0.97, 0.01), (balance, 20, 0.99, 0.02)):
        agent = config.agent
        assert (config.env.num_envs, config.env.image_size) == (1024, 64)
        assert agent.rollout_length * 1024 == 256 * 8 * unroll
        assert (agent.minibatches, agent.epochs, agent.learning_rate) == (8, 8, 1e-3)
        assert (agent.discount, agent.entropy_scale, agent.clip, agent.max_grad_norm) == (discount, entropy, 0.3, 1.0)
        assert (agent.vision.activation, agent.activation) == ("elu", "silu")
        assert (agent.initialisation, agent.policy_gain, agent.adam_eps) == ("lecun_uniform", 0.2, 1e-8)
    assert pick.total_steps == 10_000_000
    assert pick.agent.policy_layers == (128, 128, 128)
    assert balance.agent.policy_layers == (128, 64)
    assert balance.agent.frame_stack == 3


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_ppo_on_atari_has_the_numbers_of_cleanrl_on_any_machine(profile):
    agent = load(["exp=ppo", "env=atari", f"profile={profile}"], BUILT_IN).agent
    assert (agent.vision.layout, agent.vision.activation, agent.activation) == ("nature", "relu", "relu")
    assert (agent.initialisation, agent.policy_gain, agent.adam_eps) == ("orthogonal", 0.01, 1e-5)
    assert (agent.rollout_length, agent.minibatches, agent.epochs, agent.learning_rate) == (128, 4, 4, 2.5e-4)
    assert agent.policy_layers == agent.value_layers == (512,)


def test_what_comes_later_wins(tmp_path, monkeypatch):
    """The machine's numbers, then the task's, then the experiment's, then the command line's."""
    write(tmp_path / "exp/mine.yaml", "# @package _global_\ndefaults:\n  - override /agent: ppo\nagent:\n  epochs: 3\n")
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", str(tmp_path))
    for profile, epochs, length in (("cpu", 4, 32), ("gpu", 8, 40)):
        job = ["env=cartpole_balance", f"profile={profile}"]
        numbers = load(["exp=ppo", *job], Sources()).agent
        assert (numbers.epochs, numbers.rollout_length, numbers.frame_stack) == (epochs, length, 3)
        assert load(["exp=mine", *job], Sources()).agent.epochs == 3
        assert load(["exp=mine", *job, "agent.epochs=2"], Sources()).agent.epochs == 2


def test_a_file_that_builds_on_another_has_its_numbers(tmp_path, monkeypatch):
    write(tmp_path / "env/mine.yaml", "# @package _global_\ndefaults: [cartpole_balance, _self_]\nenv: {num_envs: 5}\n")
    write(tmp_path / "profile/laptop.yaml", "# @package _global_\ndefaults: [cpu, _self_]\nlog_every: 7\n")
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", str(tmp_path))
    mine = load(["exp=ppo", "env=mine", "profile=laptop", "agent.minibatches=1"], Sources())
    built_in = load(["exp=ppo", "env=cartpole_balance", "profile=cpu", "agent.minibatches=1"], Sources())
    assert mine.agent == built_in.agent
    assert mine.env == built_in.env.replace(num_envs=5)
    assert (mine.total_steps, mine.log_every) == (built_in.total_steps, 7)


def test_every_value_has_its_file(tmp_path, monkeypatch):
    composed = compose.load(["exp=ppo", "env=cartpole_balance", "profile=cpu", "seed=3"], BUILT_IN)
    assert composed.sources["agent.rollout_length"] == composed.sources["log_every"] == "profile/cpu.yaml"
    assert composed.sources["agent.frame_stack"] == "env/cartpole_balance.yaml"
    assert composed.sources["seed"] == "command line"
    assert composed.config.total_steps == 200_000
    assert "agent.replay_ratio" not in composed.sources
    assert composed.files == ["profile/cpu.yaml", "env/cartpole_balance.yaml", "command line"]
    on_gpu = compose.load(["exp=ppo", "env=cartpole_balance", "profile=gpu"], BUILT_IN)
    assert on_gpu.sources["agent.rollout_length"] == on_gpu.sources["total_steps"] == "env/cartpole_balance.yaml"


def test_show_config_prints_values_with_their_files_and_stops(sheeplike, tmp_path):
    result = sheeplike(*JOB, "profile=gpu", "seed=3", "show=config")
    assert (result.status, result.runs) == (0, [])
    lines = result.output.splitlines()
    assert "env.num_envs: 512  # profile/gpu.yaml" in lines
    assert "env.cameras: [front]  # env/franka_pick.yaml" in lines
    assert "seed: 3  # command line" in lines
    assert "agent.batch_length: 64" in lines
    assert not list(tmp_path.rglob("*.yaml"))


def test_every_environment_has_a_config():
    assert BUILT_IN.choices("env") == list_envs()


def test_profiles():
    cpu, gpu = (load([*JOB, f"profile={name}"], BUILT_IN) for name in ("cpu", "gpu"))
    assert (cpu.agent.size, cpu.fabric.accelerator, cpu.fabric.precision) == ("1m", "cpu", "32-true")
    assert (gpu.agent.size, gpu.fabric.accelerator, gpu.fabric.precision) == ("12m", "cuda", "bf16-mixed")
    assert cpu.env.num_envs < gpu.env.num_envs
    assert (gpu.agent.batch_size, gpu.agent.batch_length, gpu.agent.learning_rate) == (16, 64, 4e-5)


def test_auto_is_what_the_machine_has(has_gpu):
    assert load(JOB, BUILT_IN).profile == "gpu"
    assert load([*JOB, "profile=auto"], BUILT_IN).fabric.accelerator == "cuda"
    assert load([*JOB, "fabric.accelerator=cpu"], BUILT_IN).profile == "cpu"
    assert load([*JOB, "profile=gpu", "fabric.accelerator=cpu"], BUILT_IN).fabric.accelerator == "cpu"
    assert load([*JOB, "fabric.accelerator=auto"], BUILT_IN).fabric.accelerator == "cuda"


def test_auto_without_a_gpu():
    assert load(JOB, BUILT_IN).profile == "cpu"
    assert load([*JOB, "profile=auto", "fabric.accelerator=auto"], BUILT_IN).fabric.accelerator == "cpu"
    assert load([*JOB, "fabric.accelerator=gpu"], BUILT_IN).profile == "gpu"


def test_auto_says_why_a_gpu_is_not_used(monkeypatch, capsys):
    monkeypatch.setattr(host, "gpu_count", lambda: 1)
    monkeypatch.setattr(host, "gpu_problem", lambda: "the installed JAX has no CUDA plugin")
    assert load(JOB, BUILT_IN).profile == "cpu"
    assert capsys.readouterr().err.count("the installed JAX has no CUDA plugin") == 1


def test_the_command_line_wins():
    changes = ["agent.size=25m", "env.num_envs=8", "agent.batch_size=3", "env.image_size=[48,96]"]
    config = load([*changes, *JOB, "profile=gpu", "fabric.precision=32-true"], BUILT_IN)
    assert (config.agent.size, config.agent.widths.deter) == ("25m", 3072)
    assert (config.env.num_envs, config.agent.batch_size, config.env.image_size) == (8, 3, (48, 96))
    assert config.fabric.precision == "32-true"
    assert load([*JOB, "seed=1", "seed=2"], BUILT_IN).seed == 2
    widths = "agent.size={deter:64,hidden:8,classes:4,depth:2,units:8}"
    assert load([*JOB, widths], BUILT_IN).agent.widths.hidden == 8


@pytest.mark.parametrize("path", ["a,b", "(1)", "q'q", "#h", "1e3", "x=1", "~/x", "ü"])
@pytest.mark.parametrize("key", ["run_dir", "agent.from", "data.path"])
def test_a_path_is_taken_as_it_is_typed(key: str, path: str) -> None:
    assert parse(f"{key}={path}").value() == path


def test_values_are_typed():
    config = load([*JOB, "total_steps=1e6", "agent.horizon=100", "run_dir=2026", "agent.observations=state"], BUILT_IN)
    assert (config.total_steps, type(config.total_steps)) == (1_000_000, int)
    assert (config.agent.horizon, type(config.agent.horizon)) == (100.0, float)
    assert config.run_dir == "2026"
    assert config.agent.observations == ("state",)
    assert load([*JOB, "eval={every: null, episodes: 4}"], BUILT_IN).eval.every is None
    assert load([*JOB, "env.options.episode_length=9"], BUILT_IN).env.options == {"episode_length": 9}


def test_dry_run_shrinks_everything_but_what_is_asked_for():
    config = load([*JOB, "dry_run=true"], BUILT_IN)
    assert config.run_dir == "dry_runs/franka_pick/dreamer_v3/seed_0"
    assert config.total_steps <= 256
    assert config.env.num_envs <= 4
    for every in (config.log_every, config.video_every, config.eval.every, config.checkpoint.every):
        assert every <= config.total_steps
    updates = (config.total_steps - config.agent.learning_starts) * config.agent.replay_ratio
    assert 2 <= updates <= 16
    assert load([*JOB, "dry_run=true", "profile=gpu"], BUILT_IN).agent.size == "1m"
    asked = load([*JOB, "dry_run=true", "agent.size=12m", "total_steps=64"], BUILT_IN)
    assert (asked.agent.size, asked.total_steps) == ("12m", 64)
    assert load([*JOB, "dry_run=false"], BUILT_IN) == load(JOB, BUILT_IN)


def test_what_is_saved_is_the_configuration(tmp_path):
    config = load([*JOB, "agent.eps=1e-20", "env.image_size=[48,64]", "env.cameras=[front]"], BUILT_IN)
    assert saved(config, tmp_path) == config


def test_arguments_that_are_infinite_are_saved_as_such(tmp_path):
    config = load(["exp=ppo", "env=gym", "env.id=CartPole-v1", "env.options.arguments={limit: inf}"], BUILT_IN)
    again = saved(config, tmp_path)
    assert again.env.options["arguments"] == {"limit": float("inf")}
    assert json.loads(json.dumps(to_data(config))) == to_data(again)


def saved(config, place: Path):
    (place / "config.yaml").write_text(to_yaml(config))
    return load_saved(place / "config.yaml").config


def test_each_camera_may_have_a_size(tmp_path):
    job = [*JOB, "env.cameras=[front,wrist]", "env.image_size={front: 64, wrist: [48, 96]}"]
    config = load(job, BUILT_IN)
    assert config.env.image_size == {"front": 64, "wrist": (48, 96)}
    assert saved(config, tmp_path) == config
    assert load([*job, "env.image_size=64"], BUILT_IN).env.image_size == 64
    assert load([*JOB, "env.cameras=null", "env.image_size={front:64}"], BUILT_IN).env.image_size == {"front": 64}


def test_every_key_is_documented_and_saved():
    for agent in ("dreamer_v3", "ppo"):
        every = paths(yaml.safe_load(to_yaml(load([f"exp={agent}", "env=franka_pick"], BUILT_IN))))
        for key in all_keys(registry.find(agent).config):
            assert key.schema["description"]
            assert key.path in every or key.path.startswith("agent.size.")


def test_train_is_the_default_command(sheeplike):
    assert sheeplike("train", *JOB).runs == sheeplike(*JOB).runs


@pytest.mark.parametrize("form", ["--config-dir", "--config-dir=", "file://", "plain", "pkg://", "two"])
def test_configs_of_the_user(sheeplike, tmp_path, monkeypatch, form):
    mine = tmp_path / "it's mine"
    write(mine / "env/far_cartpole.yaml", "name: cartpole_swingup\noptions:\n  episode_length: 77\n")
    write(
        mine / "exp/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /agent: dreamer_v3\n  - override /env: far_cartpole\n"
        "agent:\n  batch_size: 5\n  size: {deter: 64, hidden: 8, classes: 4, depth: 2, units: 8}\nseed: 3\n",
    )
    flags = []
    if form.startswith("--config-dir"):
        flags = [f"{form}{mine}"] if form.endswith("=") else [form, str(mine)]
    elif form == "pkg://":
        write(tmp_path / "lib/my_package/__init__.py", "")
        mine.rename(tmp_path / "lib/my_package/configs")
        monkeypatch.syspath_prepend(tmp_path / "lib")
        monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", "pkg://my_package.configs")
    elif form == "two":
        (tmp_path / "other").mkdir()
        monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", f"{tmp_path / 'other'} ; file://{mine};")
    else:
        monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", f"{'' if form == 'plain' else form}{mine}")
    (run,) = sheeplike("exp=mine", *flags).runs
    config = run.config
    assert (config.exp, config.env.name, config.agent.widths.hidden) == ("mine", "cartpole_swingup", 8)
    assert config.env.options == {"episode_length": 77}
    assert config.run_dir == "logs/far_cartpole/dreamer_v3/mine/seed_3"
    assert config.agent.batch_size == 5, "a recipe says more than the machine's profile"
    assert sheeplike("exp=mine", "agent.batch_size=6", *flags).runs[0].config.agent.batch_size == 6
    assert "far_cartpole" in sheeplike("train", "--help", *flags).output


def test_mistakes_in_configs_of_the_user(refused, tmp_path):
    mine = tmp_path / "mine"
    flags = ("--config-dir", str(mine))
    assert str(mine) in refused(*JOB, *flags)
    write(mine / "env/typo.yaml", "name: franka_pick\nnum_env: 3\n")
    assert refused("exp=dreamer_v3", "env=typo", *flags).names("'env.num_env'", "nearest: env.num_envs")
    write(mine / "env/broken.yaml", "name: [franka_pick\n")
    assert "broken.yaml" in refused("exp=dreamer_v3", "env=broken", *flags)
    write(mine / "env/list.yaml", "- franka_pick\n")
    assert "env/list" in refused("exp=dreamer_v3", "env=list", *flags)
    write(mine / "exp/lost.yaml", "# @package _global_\ndefaults:\n  - override /agent: dreamer_v4\n")
    lost = refused("exp=lost", "env=franka_pick", *flags)
    assert lost.names("'dreamer_v4'", "dreamer_v3, plan2explore, ppo", "nearest: dreamer_v3")
    write(mine / "exp/bare.yaml", "defaults:\n  - override /agent: dreamer_v3\n")
    assert refused("exp=bare", "env=franka_pick", *flags).names("exp/bare.yaml", "'# @package _global_'")
    write(mine / "exp/none.yaml", "# @package _global_\nseed: 1\n")
    assert "'- override /agent: dreamer_v3'" in refused("exp=none", "env=franka_pick", *flags)
    write(mine / "exp/twice.yaml", "# @package _global_\ndefaults:\n  - /agent: dreamer_v3\n")
    assert "'- override /agent: <name>'" in refused("exp=twice", "env=franka_pick", *flags)
    write(mine / "exp/high.yaml", "# @package _global_\ndefaults:\n  - override /agent: ppo\nlearning_rate: 1\n")
    high = refused("exp=high", "env=franka_pick", *flags)
    assert high.names("exp/high.yaml", "'learning_rate'", "nearest: agent.learning_rate")
    write(mine / "exp/size.yaml", "# @package _global_\ndefaults: [override /agent: dreamer_v3]\nagent: {size: 12mm}\n")
    assert "nearest: agent.size=12m (in exp/size.yaml)" in refused("exp=size", "env=franka_pick", *flags)
    for section, place in (
        ("agents: {dreamer_v3: {agent: }}", "agents: dreamer_v3: agent:"),
        ("profiles: {cpu: {env: }}", "profiles: cpu: env:"),
        ("agents: {dreamer_v3: 3}", "agents: dreamer_v3:"),
    ):
        write(mine / "exp/empty.yaml", f"# @package _global_\ndefaults: [override /agent: dreamer_v3]\n{section}\n")
        assert refused("exp=empty", "env=franka_pick", *flags).names("exp/empty.yaml", place)
    write(mine / "env/nothing.yaml", "cameras: [front]\n")
    assert "env/nothing.yaml" in refused("exp=dreamer_v3", "env=nothing", *flags)
    write(mine / "env/franca.yaml", "defaults: [franka]\n")
    assert refused("exp=dreamer_v3", "env=franca", *flags).names("env/franca.yaml", "'franka'")
    write(mine / "env/franka_pick.yaml", "name: franka_pick\n")
    assert "env=franka_pick" in refused(*JOB, *flags)


def test_a_search_path_that_is_not_there(refused, monkeypatch):
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", "pkg://no_such_package.configs")
    assert "SHEEPLIKE_SEARCH_PATH pkg://no_such_package.configs" in refused(*JOB)


def test_composing_reads_no_code():
    text = "".join(path.read_text() for path in CONFIGS.rglob("*.yaml"))
    assert "_target_" not in text


def test_help_is_light():
    code = (
        "import sys; from sheeplike.__main__ import main; main(['--help'])\n"
        "heavy = {'torch', 'jax', 'hydra', 'mujoco', 'gymnasium', 'numpy', 'lightning'} & set(sys.modules)\n"
        "print(heavy or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "light"
    for word in ("franka_pick", "cartpole_balance", "dreamer_v3", "gpu", "train", "resume=", "--config-dir"):
        assert word in done.stdout


def test_help_of_train_lists_every_key(sheeplike):
    text = sheeplike("train", "--help").output
    for key in all_keys(*registry.built_in()):
        assert key.is_section or key.path == "agent" or f"  {key.path}" in text


def test_help_of_a_run_shows_its_values_beside_the_defaults(sheeplike):
    lines = sheeplike(
        "train", "--help", "exp=ppo", "env=franka_pick", "profile=cpu", "agent.epochs=7"
    ).output.splitlines()
    rows = {words[0]: words[1:3] for line in lines if (words := line.split())}
    assert rows["key"] == ["value", "default"]
    assert rows["agent.epochs"] == ["7", "8"]
    assert rows["env.options.picked_probability"][1] == "0.05"
    assert "env.cameras" in rows
    assert "agent.horizon" not in rows


def test_help_of_a_task_lists_its_options_and_leaves_out_what_it_does_not_take(sheeplike):
    lines = sheeplike("train", "--help", "env=gym").output.splitlines()
    keys = {words[0] for line in lines if (words := line.split())}
    assert {"env.options.frame_stack", "env.id", "agent.epochs", "agent.horizon"} <= keys
    assert not {"env.renderer", "env.cameras", "env.depth"} & keys


def test_version(sheeplike):
    assert sheeplike("--version").output == "0.1.0\n"


def test_randomization_is_a_choice_whose_lines_can_be_changed() -> None:
    config = load(["exp=ppo", "env=franka_pick", "randomization=franka_physics"], BUILT_IN)
    assert config.randomization["gravity"]["field"] == "opt.gravity"
    assert config.run_dir == "logs/franka_pick/franka_physics/ppo/seed_0"
    changed = load(
        ["exp=ppo", "env=franka_pick", "randomization=franka_physics", "randomization.gravity.component=1"], BUILT_IN
    )
    assert changed.randomization["gravity"]["component"] == 1
    line = "{field: geom_rgba, operation: scale, distribution: {uniform: [0.9, 1.1]}}"
    own = load(["exp=ppo", "env=franka_pick", f"randomization.tint={line}"], BUILT_IN)
    assert own.randomization == {
        "tint": {"field": "geom_rgba", "operation": "scale", "distribution": {"uniform": [0.9, 1.1]}}
    }
    assert own.run_dir == "logs/franka_pick/randomized/ppo/seed_0"
    assert load(["exp=ppo", "env=franka_pick"], BUILT_IN).randomization == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("randomization.gravity.operation=scael", "nearest: randomization.gravity.operation=scale"),
        ("randomization.gravity.feild=x", "nearest: field"),
        ("randomization.gravity=3", "randomization.gravity=3"),
        ("randomization=franka_vison", "nearest: franka_vision"),
    ],
)
def test_lines_that_cannot_be_are_refused_before_anything_is_built(override: str, message: str) -> None:
    with pytest.raises(CommandError) as refused:
        load(["exp=ppo", "env=franka_pick", "randomization=franka_physics", override], BUILT_IN)
    assert message in str(refused.value)
