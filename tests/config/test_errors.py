"""Bad input: one line that says what, where, what was expected and the nearest valid choice."""

import subprocess
import sys

import pytest

from sheeplike import envs
from sheeplike.__main__ import main
from sheeplike.config.errors import as_command_errors, nearest
from sheeplike.options import CommandError

JOB = ("exp=dreamer_v3", "env=franka_pick")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["exp= is missing", "dreamer_v3"]),
        (("env=franka_pick",), ["exp= is missing", "dreamer_v3"]),
        (("exp=dreamer_v3",), ["env= is missing", "cartpole_balance, cartpole_swingup", "franka_pick"]),
        (("exp=dreamr_v3", "env=franka_pick"), ["exp 'dreamr_v3'", "one of dreamer_v3", "nearest: dreamer_v3"]),
        (("exp=dreamer_v3", "env=frankapick"), ["env 'frankapick'", "cartpole_swingup", "nearest: franka_pick"]),
        ((*JOB, "agent.size=12M"), ["agent.size=12M", "200m", "nearest: agent.size=12m"]),
        ((*JOB, "profile=gppu"), ["profile 'gppu'", "auto, cpu", "nearest: gpu"]),
        ((*JOB, "randomization=franka_vison"), ["randomization 'franka_vison'", "nearest: franka_vision"]),
        ((*JOB, "fabric=3"), ["fabric=3", "a section with the keys accelerator"]),
        ((*JOB, "agent=null"), ["agent 'None'", "one of dreamer_v3"]),
        ((*JOB, "agent/size=12m"), ["unknown key 'agent/size'", "nearest: agent.size"]),
    ],
)
def test_names(refused, arguments, parts):
    line = refused(*arguments)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("agent.batchsize", "agent.batch_size"),
        ("agent.batch_sise", "agent.batch_size"),
        ("num_envs", "env.num_envs"),
        ("algo.replay_ratio", "agent.replay_ratio"),
        ("agent.loss_scales.repval", "agent.loss_scales.replay_value"),
        ("totalsteps", "total_steps"),
        ("checkpoint.evry", "checkpoint.every"),
        ("+seeed", "seed"),
        ("++env.image_sizes", "env.image_size"),
    ],
)
def test_unknown_key(refused, key, match):
    line = refused(*JOB, f"{key}=1")
    assert f"unknown key '{key.lstrip('+')}'" in line
    assert f"nearest: {match};" in line


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("seed=abc", ["seed=abc", "an integer from 0 to 2147483647", "nearest: seed=0"]),
        ("seed=-1", ["seed=-1", "nearest: seed=0"]),
        ("seed=1.5", ["seed=1.5", "an integer", "nearest: seed=2"]),
        ("seed=null", ["seed=null", "an integer", "nearest: seed=0"]),
        ("total_steps=true", ["total_steps=true", "an integer from 1 to", "nearest: total_steps=100000"]),
        ("total_steps=1e99", ["total_steps=1e+99", "nearest: total_steps=1000000000000"]),
        ("dry_run=yes", ["dry_run=yes", "true or false", "nearest: dry_run=true"]),
        ("dry_run=1", ["dry_run=1", "true or false", "nearest: dry_run=true"]),
        ("log_every=0", ["log_every=0", "nearest: log_every=1"]),
        ("video_every=[1,2]", ["video_every=[1,2]", "or null", "nearest: video_every=5000"]),
        ("env.num_envs=0", ["env.num_envs=0", "nearest: env.num_envs=1"]),
        ("env.image_size=50", ["env.image_size=50", "48 to 256", "multiple of 16", "nearest: env.image_size=48"]),
        ("env.image_size=300", ["nearest: env.image_size=256"]),
        ("env.image_size=60.5", ["nearest: env.image_size=64"]),
        ("env.image_size=[50,1000]", ["env.image_size=[50,1000]", "nearest: env.image_size=[48,256]"]),
        ("env.image_size=[64,64,3]", ["env.image_size=[64,64,3]", "nearest: env.image_size=48"]),
        ("env.cameras=[1]", ["env.cameras=[1]", "a list of one or more names, or null"]),
        ("env.cameras=[front,wrst]", ["cameras: front, scene, wrist", "nearest: env.cameras=[front,wrist]"]),
        (
            "env.image_size={front:50}",
            [
                "a list of 2 such, or {name: value} with such a value for each camera",
                "nearest: env.image_size={front:48}",
            ],
        ),
        (
            "env.image_size={front:[64,300]}",
            ["env.image_size={front:[64,300]}", "nearest: env.image_size={front:[64,256]}"],
        ),
        ("env.image_size={front:big}", ["env.image_size={front:big}", "an integer from 48 to 256"]),
        ("env.image_size={}", ["env.image_size={}", "for each camera"]),
        ("env.image_size={front:64,wrist:48}", ["a size for each of env.cameras=[front], and for no other"]),
        ("env.image_size={wrist:48}", ["a size for each of env.cameras=[front], and for no other"]),
        ("env.renderer=wrap", ["one of warp, none", "nearest: env.renderer=warp"]),
        ("env.renderer=non", ["env.renderer=non", "warp, none", "nearest: env.renderer=none"]),
        ("env.renderer=none", ["agent.observations=[pixels/*]: expected vectors alone", "observations=[state]"]),
        ("env.segmentation=seg", ["true or false", "nearest: env.segmentation=false"]),
        ("env.shadows=2", ["true or false", "nearest: env.shadows=false"]),
        ("env.textures=on", ["true or false", "nearest: env.textures=true"]),
        ("agent.targets=[1]", ["agent.targets=[1]", "a list of names"]),
        ("env.depth=maybe", ["env.depth=maybe", "true or false", "nearest: env.depth=false"]),
        ("env.name=franka", ["env.name=franka", "cartpole_balance", "nearest: env.name=franka_pick"]),
        (
            "env.options.episode_lenght=9",
            ["unknown key 'env.options.episode_lenght'", "franka_pick's", "nearest: env.options.episode_length"],
        ),
        ("env.options.episode_length=long", ["env.options.episode_length=long", "an integer", "nearest"]),
        ("env.options=3", ["env.options=3", "a section"]),
        ("agent.name=ppoo", ["agent.name=ppoo", "one of dreamer_v3, ppo", "nearest: agent.name=ppo"]),
        ("agent.observations=[]", ["agent.observations=[]", "nearest: agent.observations=[pixels/*]"]),
        ("agent.size=2m", ["one of 1m, 12m", "nearest: agent.size=1m"]),
        ("agent.size={deter:100}", ["agent.size.deter=100", "a multiple of 8", "nearest: agent.size.deter=104"]),
        ("agent.size={deter:64}", ["agent.size.hidden is missing: expected an integer from 1 to 65536"]),
        ("agent.size={classes:300}", ["nearest: agent.size.classes=256"]),
        ("agent.replay_ratio=0", ["agent.replay_ratio=0", "above 0", "nearest: agent.replay_ratio=0.125"]),
        ("agent.replay_ratio=-1", ["agent.replay_ratio=-1", "above 0", "nearest: agent.replay_ratio=0.125"]),
        ("agent.replay_ratio=.nan", ["agent.replay_ratio=.nan", "a number above 0"]),
        ("agent.replay_ratio=nan", ["agent.replay_ratio=nan", "a number above 0"]),
        ("agent.learning_rate=inf", ["agent.learning_rate=inf", "above 0 and at most 1"]),
        (
            "agent.batch_size=abc",
            ["agent.batch_size=abc", "an integer from 1 to 65536", "nearest: agent.batch_size=16"],
        ),
        ("agent.beta2=1", ["agent.beta2=1", "of at least 0 and below 1", "nearest: agent.beta2=0.999"]),
        ("agent.horizon=1", ["agent.horizon=1", "above 1", "nearest: agent.horizon=33"]),
        ("agent.loss_scales.rep=-1", ["agent.loss_scales.rep=-1", "nearest: agent.loss_scales.rep=0"]),
        ("agent.loss_scales=3", ["agent.loss_scales=3", "a section with the keys reconstruction, reward"]),
        ("eval=3", ["eval=3", "a section with the keys every, episodes"]),
        ("eval={evry: 3}", ["unknown key 'eval.evry'", "nearest: eval.every"]),
        ("eval.episodes=0", ["eval.episodes=0", "from 1 to 65536", "nearest: eval.episodes=1"]),
        ("eval.num_envs=99", ["eval.num_envs=99", "at most eval.episodes=16", "nearest: eval.num_envs=16"]),
        ("checkpoint.keep_last=0", ["checkpoint.keep_last=0", "nearest: checkpoint.keep_last=1"]),
        ("checkpoint.keep=1", ["checkpoint.keep", "nearest: checkpoint.keep_"]),
        ("checkpoint.replay=full", ["checkpoint.replay=full", "true or false", "nearest: checkpoint.replay=true"]),
        ("fabric.precision=32", ["fabric.precision=32", "32-true", "nearest: fabric.precision=32-true"]),
        ("fabric.precision=16-true", ["fabric.precision=16-true", "one of 32-true, bf16-mixed", "nearest"]),
        ("fabric.accelerator=tpu", ["fabric.accelerator=tpu", "auto, cpu, cuda, gpu", "nearest"]),
        ("logger.tensorboard=2", ["logger.tensorboard=2", "true or false"]),
    ],
)
def test_values(refused, override, parts):
    line = refused(*JOB, override)
    assert all(part in line for part in parts), line


def test_what_is_not_rendered_cannot_be_observed(refused, sheeplike):
    blind = ("exp=ppo", "env=franka_pick", "env.renderer=none")
    line = refused(*blind, "agent.observations=[state,depth/*]")
    assert "agent.observations=[state,depth/*]: expected vectors alone, since env.renderer=none" in line
    assert line.endswith("nearest: agent.observations=[state]\n")
    line = refused(*blind, "agent.observations=[state]", "agent.value_observations=[pixels/*]")
    assert "agent.value_observations=[pixels/*]: expected vectors alone" in line
    for option in ("depth", "segmentation", "shadows", "textures"):
        line = refused(*blind, "agent.observations=[state]", f"env.{option}=true")
        assert f"env.{option}=true: expected false, since env.renderer=none" in line
    config = sheeplike(*blind, "agent.observations=['*state']").runs[0].config
    assert (config.env.renderer, config.env.cameras) == ("none", ("front",))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("env.renderer=none", "env.renderer=none: expected warp, since elsewhere simulates and renders itself"),
        ("env.cameras=[front]", "env.cameras=[front]: expected null, since"),
        ("env.depth=true", "env.depth=true: expected false, since"),
        ("env.segmentation=true", "env.segmentation=true: expected false, since"),
        ("env.shadows=true", "env.shadows=true: expected false, since"),
        ("env.textures=true", "env.textures=true: expected null, since"),
        ("env.image_size={front:64}", "env.image_size={front:64}: expected one size, since"),
    ],
)
def test_what_others_render_is_left_to_them(refused, sheeplike, monkeypatch, override, part):
    def elsewhere(*, num_envs, device, image_size, action_repeat, seed): ...

    monkeypatch.setitem(envs.registry.BUILT_IN, "elsewhere", elsewhere)
    job = ("exp=ppo", "env=cartpole_balance", "env.name=elsewhere")
    assert sheeplike(*job).runs[0].config.env.name == "elsewhere"
    assert part in refused(*job, override)


def test_a_sequence_longer_than_the_ring(refused):
    line = refused(*JOB, "agent.replay_size=1600", "env.num_envs=16", "agent.batch_length=99")
    assert "agent.batch_length=99: expected at most 98" in line
    assert "agent.replay_size=1616" in line
    assert "nearest: agent.batch_length=98" in line
    line = refused(*JOB, "agent.replay_size=16", "env.num_envs=16", "agent.batch_length=8")
    assert "env.num_envs=16: expected at most 1, since agent.replay_size=16" in line
    assert "or agent.replay_size=160; nearest: env.num_envs=1" in line
    line = refused(*JOB, "agent.replay_size=5", "env.num_envs=2", "agent.batch_length=8")
    assert "agent.replay_size=5: expected at least 20" in line, "not even one world would do"
    line = refused(*JOB, "agent.replay_size=1600", "env.num_envs=800", "agent.batch_length=8")
    assert line.endswith("nearest: env.num_envs=160\n")


def test_learning_starts_too_early(refused, sheeplike):
    sizes = ("env.num_envs=4", "agent.batch_size=4", "agent.batch_length=9")
    line = refused(*JOB, *sizes, "agent.learning_starts=39")
    assert "agent.learning_starts=39: expected at least 40" in line
    assert "nearest: agent.learning_starts=40" in line
    assert sheeplike(*JOB, *sizes).runs[0].config.agent.learning_starts == 40


def test_learning_starts_before_one_batch(refused, sheeplike):
    sizes = ("env.num_envs=4", "agent.batch_size=8", "agent.batch_length=9")
    assert "agent.learning_starts=71: expected at least 72" in refused(*JOB, *sizes, "agent.learning_starts=71")
    assert sheeplike(*JOB, *sizes).runs[0].config.agent.learning_starts == 72


def test_too_short_for_one_update(refused, sheeplike):
    sizes = ("env.num_envs=4", "agent.batch_size=4", "agent.batch_length=9", "agent.replay_ratio=0.25")
    line = refused(*JOB, *sizes, "total_steps=43")
    assert "total_steps=43: expected at least 44" in line
    assert "nearest: total_steps=44" in line
    assert sheeplike(*JOB, *sizes, "total_steps=44").runs


@pytest.mark.parametrize("asked", ["profile=gpu", "fabric.accelerator=cuda", "fabric.accelerator=gpu"])
def test_a_gpu_that_is_not_there(refused, asked):
    line = refused(*JOB, asked)
    assert "fabric.accelerator=cuda, profile=gpu: expected a GPU, but this machine shows no NVIDIA GPU" in line
    assert "nearest: fabric.accelerator=cpu profile=cpu" in line


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("env.cameras=[front", ["malformed override 'env.cameras=[front'", "nearest: a bracket that is closed"]),
        ("=3", ["'=3'", "expected key=value"]),
        ("seed", ["'seed'", "expected key=value"]),
        ("~seed", ["'~seed'", "cannot be removed"]),
        ("seed=1,2", ["'seed=1,2'", "expected one value"]),
        ("seed=range(3)", ["'seed=range(3)'", "expected one value"]),
        ("--config-dirr=x", ["flag '--config-dirr'", "nearest: --config-dir"]),
        ("--multirun", ["flag '--multirun'", "--help, --version, --config-dir"]),
        ("--config-dir", ["--config-dir", "expected a directory"]),
        ("env@other=franka_pick", ["env@other"]),
        ("hydra.run.dir=x", ["unknown key 'hydra.run.dir'"]),
        ("agent.learning_rate=${nothing}", ["nothing"]),
        ("agent.learning_rate=???", ["agent.learning_rate"]),
    ],
)
def test_syntax(refused, argument, parts):
    line = refused(*JOB, argument)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("key", ["run_dir", "resume"])
def test_a_home_directory_that_is_not_there(refused, key):
    assert "~nouser/x: there is no such home directory; nearest: './~nouser/x'" in refused(*JOB, f"{key}=~nouser/x")


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ("defaults:", "expected a list such as '- override /agent: dreamer_v3'"),
        ("defaults: ppo", "expected a list such as"),
        ("defaults: {a: 1}", "expected a list such as"),
        ("defaults: [1]", "expected a list such as"),
        ("defaults: [{override /agent: [ppo]}]", "agent: expected one name, such as '- override /agent: <name>'"),
        ("defaults: [mine, {override /agent: ppo}]", "builds on itself: expected a list such as"),
    ],
)
def test_a_recipe_whose_defaults_are_none(refused, tmp_path, defaults, said):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/mine.yaml").write_text(f"# @package _global_\n{defaults}\n")
    line = refused("exp=mine", "env=cartpole_balance", "--config-dir", str(tmp_path))
    assert said in line, line


def test_command(refused):
    line = refused("trian", *JOB)
    assert "command 'trian' does not exist: expected one of train" in line
    assert "nearest: train" in line


def test_the_traceback_is_there_for_those_who_debug(sheeplike, monkeypatch):
    monkeypatch.setenv("SHEEPLIKE_DEBUG", "1")
    with pytest.raises(CommandError, match="expected an integer"):
        sheeplike(*JOB, "seed=abc")


def test_ctrl_c_leaves_no_traceback(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("sheeplike.__main__.dispatch", interrupted)
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 130


def test_errors_come_before_torch_and_jax():
    code = (
        "import sys; from sheeplike.__main__ import main\n"
        "try: main(['exp=dreamer_v3', 'env=franka_pick', 'agent.replay_ratio=0'])\n"
        "finally: print(sorted({'torch', 'jax', 'mujoco', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == "[]\n"
    assert done.stderr.startswith("sheeplike: agent.replay_ratio=0: expected a number above 0")
    assert done.stderr.count("\n") == 1


def test_construction_errors_become_one_line():
    with (
        pytest.raises(CommandError, match=r"^camera 'frnt': expected front$"),
        as_command_errors(ValueError),
    ):
        raise ValueError("camera 'frnt': expected front\nmore")
    with pytest.raises(KeyError), as_command_errors(ValueError):
        raise KeyError("a defect")


def test_nearest():
    assert nearest("Franka_Pik", ["cartpole", "franka_pick"]) == "franka_pick"
    assert nearest("32", ["32-true", "bf16-mixed"]) == "32-true"
    assert nearest("xyz", ["cartpole"]) is None
    assert nearest("", ["cartpole"]) is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("agent.minibatches=7", ["2048 steps (env.num_envs=64 x agent.rollout_length=32)", "agent.minibatches=8"]),
        ("agent.minibatches=4096", ["a divisor of the rollout's 2048 steps", "nearest: agent.minibatches=2048"]),
        ("total_steps=2048", ["total_steps=2048", "at least 2112", "nearest: total_steps=2112"]),
        ("learning_starts=100", ["unknown key 'learning_starts'", "nearest: agent.learning_starts"]),
        ("agent.learning_starts=100", ["agent.learning_starts: ppo has no such key"]),
        ("agent.replay_ratio=1", ["agent.replay_ratio: ppo has no such key"]),
        ("agent.gae_lamda=1", ["unknown key 'agent.gae_lamda'", "nearest: agent.gae_lambda"]),
        ("agent.return_lambda=0.9", ["ppo has no such key", "nearest: agent.gae_lambda"]),
        ("agent.size=1m", ["agent.size: ppo has no such key"]),
        ("agent.policy_layers=[64,0]", ["[64,0]", "integers of at least 1"]),
        ("agent.policy_layers=[]", ["integers of at least 1"]),
        ("agent.policy_layers=wide", ["integers of at least 1"]),
        ("agent.observations=[1]", ["one or more names"]),
        ("agent.vision.layout=natur", ["max_pool, nature", "nearest: agent.vision.layout=nature"]),
        ("agent.vision.head=mean", ["flatten, average, max, spatial_softmax"]),
        ("agent.distribution=normal", ["clipped_normal", "nearest: agent.distribution="]),
        ("agent.kl_control=stop", ["early_stop", "nearest"]),
        ("agent.discount=1", ["agent.discount=1", "below 1"]),
        ("agent.clip=0", ["agent.clip=0", "above 0"]),
        ("agent.frame_stack=0", ["nearest: agent.frame_stack=1"]),
        ("agent.name=dreamer_v3", ["agent.name=dreamer_v3: expected ppo", "nearest: exp=dreamer_v3"]),
    ],
)
def test_values_of_ppo(refused, override, parts):
    line = refused("exp=ppo", "env=cartpole_balance", override)
    assert all(part in line for part in parts), line
