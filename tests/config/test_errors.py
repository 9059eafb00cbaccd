"""Bad input: one line that says what, where, what was expected and the nearest valid choice."""

import itertools
import subprocess
import sys

import pytest

from sheeplike import envs
from sheeplike.__main__ import main
from sheeplike.config.compose import load
from sheeplike.config.errors import as_command_errors, nearest
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.options import CommandError, flat

JOB = ("exp=dreamer_v3", "env=franka_pick")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["exp=", "dreamer_v3"]),
        (("env=franka_pick",), ["exp=", "dreamer_v3"]),
        (("exp=dreamer_v3",), ["env=", "cartpole_balance, cartpole_swingup", "franka_pick"]),
        (("exp=dreamr_v3", "env=franka_pick"), ["exp 'dreamr_v3'", "dreamer_v3", "nearest: dreamer_v3"]),
        (("exp=dreamer_v3", "env=frankapick"), ["env 'frankapick'", "cartpole_swingup", "nearest: franka_pick"]),
        (("exp=dreamer_v3", "env=CartPole-v1"), ["CartPole-v1", "nearest: env=gym env.id=CartPole-v1"]),
        (("exp", "dreamer_v2"), ["exp", "nearest: exp=dreamer_v3"]),
        (("--env", "frankapick"), ["--env", "nearest: env=franka_pick"]),
        ((*JOB, "agent.size=12M"), ["agent.size=12M", "200m", "nearest: agent.size=12m"]),
        ((*JOB, "profile=gppu"), ["profile 'gppu'", "auto, cpu", "nearest: gpu"]),
        ((*JOB, "randomization=franka_vison"), ["randomization 'franka_vison'", "nearest: franka_vision"]),
        ((*JOB, "fabric=3"), ["fabric=3", "accelerator"]),
        ((*JOB, "agent=null"), ["agent 'None'", "dreamer_v3"]),
        ((*JOB, "agent/size=12m"), ["'agent/size'", "nearest: agent.size"]),
    ],
)
def test_names(refused, arguments, parts):
    assert refused(*arguments).names(*parts)


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
    assert f"'{key.lstrip('+')}'" in line
    assert f"nearest: {match};" in line


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("seed=abc", "seed=0"),
        ("seed=-1", "seed=0"),
        ("seed=1.5", "seed=2"),
        ("seed=null", "seed=0"),
        ("total_steps=true", "total_steps=1000000"),
        ("dry_run=yes", "dry_run=true"),
        ("dry_run=1", "dry_run=true"),
        ("log_every=0", "log_every=1"),
        ("env.num_envs=0", "env.num_envs=1"),
        ("env.image_size=50", "env.image_size=48"),
        ("env.image_size=300", "env.image_size=256"),
        ("env.image_size=60.5", "env.image_size=64"),
        ("env.image_size=[50,1000]", "env.image_size=[48,256]"),
        ("env.image_size=[64,64,3]", "env.image_size=48"),
        ("env.image_size={front:50}", "env.image_size=48"),
        ("env.segmentation=seg", "env.segmentation=false"),
        ("env.shadows=2", "env.shadows=false"),
        ("env.textures=on", "env.textures=true"),
        ("env.depth=maybe", "env.depth=false"),
        ("agent.observations=[]", "agent.observations=[pixels/*]"),
        ("agent.size={classes:300}", "agent.size.classes=256"),
        ("agent.replay_ratio=0", "agent.replay_ratio=0.0625"),
        ("agent.replay_ratio=-1", "agent.replay_ratio=0.0625"),
        ("agent.batch_size=abc", "agent.batch_size=16"),
        ("agent.beta2=1", "agent.beta2=0.999"),
        ("agent.horizon=1", "agent.horizon=33"),
        ("agent.loss_scales.rep=-1", "agent.loss_scales.rep=0"),
        ("eval.episodes=0", "eval.episodes=1"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last=1"),
        ("checkpoint.replay=full", "checkpoint.replay=true"),
    ],
)
def test_values(refused, override, nearest):
    assert refused(*JOB, override).names(
        override.partition("=")[0] if "{" in override else override, f"nearest: {nearest}"
    )


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("total_steps=1e99", ["total_steps=1e+99", "nearest: total_steps=1000000000000"]),
        ("video_every=[1,2]", ["null", "nearest: video_every=20000"]),
        ("env.cameras=[1]", ["null"]),
        ("env.cameras=[front,front]", ["nearest: env.cameras=[front]"]),
        ("env.image_size={front:big}", []),
        ("env.image_size={}", []),
        ("env.renderer=wrap", ["warp, none", "nearest: env.renderer=warp"]),
        ("env.renderer=non", ["warp, none", "nearest: env.renderer=none"]),
        ("agent.targets=[1]", []),
        ("env.name=franka", ["cartpole_balance", "nearest: env.name=franka_pick"]),
        ("env.options.episode_lenght=9", ["franka_pick", "nearest: env.options.episode_length"]),
        ("env.options.episode_length=long", []),
        ("env.options=3", []),
        ("agent.name=ppoo", ["dreamer_v3, plan2explore, ppo", "nearest: agent.name=ppo"]),
        ("agent.size=2m", ["1m, 12m", "nearest: agent.size=1m"]),
        ("agent.size={deter:100}", ["agent.size.deter=100", "nearest: agent.size.deter=104"]),
        ("agent.size={deter:64}", ["agent.size.hidden"]),
        ("agent.replay_ratio=.nan", []),
        ("agent.replay_ratio=nan", []),
        ("agent.learning_rate=inf", []),
        ("agent.loss_scales=3", []),
        ("eval=3", []),
        ("eval={evry: 3}", ["'eval.evry'", "nearest: eval.every"]),
        ("checkpoint.keep=1", ["checkpoint.keep", "nearest: checkpoint.keep_"]),
        ("fabric.precision=32", ["32-true", "nearest: fabric.precision=32-true"]),
        ("fabric.precision=16-true", ["32-true, bf16-mixed"]),
        ("fabric.accelerator=tpu", ["auto, cpu, cuda, gpu"]),
        ("logger.tensorboard=false", ["unknown key", "nearest: logger;"]),
        ("env.options={x: {0: a}}", ["env.options="]),
        ("env.options={x: nan}", ["env.options="]),
        ("wandb=true", ["unknown key", "nearest: logger=[tensorboard,wandb];"]),
        ("logger=null", ["a list of names", "nearest: logger=[tensorboard]"]),
        ("logger=[mlfow]", ["tensorboard, wandb, mlflow", "nearest: logger=mlflow"]),
        ("-m=x", ["seeds=3", "nearest: python -m sheeplike train exp=dreamer_v3 env=franka_pick"]),
        ("--multirun", ["seeds=3", "nearest: python -m sheeplike train exp=dreamer_v3 env=franka_pick"]),
    ],
)
def test_values_and_what_would_do(refused, override, facts):
    assert refused(*JOB, override).names(override.partition("=")[0], *facts)


@pytest.mark.parametrize(
    ("given", "swept"),
    [
        (["--multirun", *JOB, "agent.clip=1e-4,3e-4", "exp=ppo"], {"agent.clip": (1e-4, 3e-4)}),
        (
            ["env=franka_pick", "exp=ppo,dreamer_v3", "env.cameras=[front],[front,wrist]", "run_dir=$A's runs", "-m"],
            {"exp": ("ppo", "dreamer_v3"), "env.cameras": (["front"], ["front", "wrist"])},
        ),
        ([*JOB, "-m", "seed=range(3,6)", "compile=choice(auto,off)"], {"seed": (3, 4, 5), "compile": ("auto", "off")}),
        ([*JOB, "-m", "seed=7", "run_dir=a,b"], {"seed": (7,)}),
    ],
)
def test_a_sweep_is_answered_with_the_loop_that_runs_all_of_it(refused, given, swept, tmp_path, monkeypatch):
    """Run by a shell, in which python writes down its arguments: each command is a run of its own."""
    loop = refused(*given).partition("nearest: ")[2]
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\" ''\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, check=True)
    configs = []
    for command in done.stdout.removesuffix("\n\n").split("\n\n"):
        module, arguments = command.splitlines()[:3], command.splitlines()[3:]
        assert module == ["-m", "sheeplike", "train"]
        configs.append(load(arguments, Sources()).config)
    values = [dict(flat(to_data(config))) for config in configs]
    assert [tuple(one[key] for key in swept) for one in values] == list(itertools.product(*swept.values()))
    place = next((word.partition("=")[2] for word in given if word.startswith("run_dir=")), "logs")
    assert all(config.run_dir.startswith(place) for config in configs)
    assert len({config.run_dir for config in configs}) == len(configs)


def test_a_sweep_of_another_command_keeps_its_name(refused):
    assert refused("eval", "-m", "run=demo:franka_pick", "sample=true,false").names("eval run=demo:franka_pick")


@pytest.mark.parametrize(
    ("section", "below"),
    [
        ("eval=0.5", "eval.episodes=17"),
        ("eval=null", "eval.every=null"),
        ("checkpoint=x", "checkpoint.keep_last=3"),
        ("fabric=[]", "fabric.threads=1"),
        ("agent.loss_scales=3", "agent.loss_scales.rep=1"),
        ("env.options=0.5", "env.options.length=7"),
        ("env.options=null", "env.options.length=7"),
        ("agent.size=12m", "agent.size.deter=64"),
    ],
)
def test_a_value_does_not_replace_a_section(refused, section, below):
    assert refused(*JOB, section, below).names(section)


def test_nor_does_it_in_a_file(refused, tmp_path):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\ndefaults: [dreamer_v3]\neval: 0.5\n")
    assert refused(f"--config-dir={tmp_path}", "exp=mine", JOB[1], "eval.episodes=17").names("eval=0.5", "mine.yaml")


@pytest.mark.parametrize("line", ["null: 5", "env: {null: 3}", "seed: ${nope}", "seed: ???", "seed: ${"])
def test_a_line_that_cannot_be_read_names_its_file(refused, tmp_path, line):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(f"# @package _global_\ndefaults: [ppo]\n{line}\n")
    assert "mine.yaml" in refused(f"--config-dir={tmp_path}", "exp=mine", JOB[1])


@pytest.mark.parametrize("line", ["eval.every: 100", "resume: auto"])
def test_a_key_that_files_do_not_have(refused, tmp_path, line):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text(f"# @package _global_\ndefaults: [ppo]\n{line}\n")
    assert refused(f"--config-dir={tmp_path}", "exp=mine", JOB[1]).names("mine.yaml", line.split(":")[0])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1"])
def test_a_file_in_another_encoding_is_named(encoding, refused, tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "mine.yaml").write_text("# @package _global_\n# é\nseed: 1\n", encoding=encoding)
    assert refused(f"--config-dir={tmp_path}", *JOB, "profile=mine").names("mine.yaml", "UTF-8")


def test_what_is_not_rendered_has_no_options(refused, sheeplike):
    blind = ("exp=ppo", "env=franka_pick", "env.renderer=none")
    for option in ("depth", "segmentation", "shadows", "textures"):
        line = refused(*blind, "agent.observations=[state]", f"env.{option}=true")
        assert line.names(f"env.{option}=true", "false", "env.renderer=none")
    config = sheeplike(*blind, "agent.observations=['*state']").runs[0].config
    assert (config.env.renderer, config.env.cameras) == ("none", ("front",))


@pytest.mark.parametrize(
    "override",
    [
        "env.renderer=none",
        "env.cameras=[front]",
        "env.depth=true",
        "env.segmentation=true",
        "env.shadows=true",
        "env.textures=true",
        "env.image_size={front:64}",
    ],
)
def test_what_others_render_is_left_to_them(refused, sheeplike, monkeypatch, override):
    def elsewhere(*, num_envs, device, image_size, action_repeat, seed): ...

    monkeypatch.setitem(envs.registry.BUILT_IN, "elsewhere", elsewhere)
    job = ("exp=ppo", "env=cartpole_balance", "env.name=elsewhere")
    assert sheeplike(*job).runs[0].config.env.name == "elsewhere"
    assert refused(*job, override).names(override, "elsewhere")


def test_a_backend_that_mujoco_does_not_know(refused, sheeplike, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "nope")
    assert refused(*JOB).names("MUJOCO_GL=nope", "egl, osmesa")
    assert refused("exp=ppo", JOB[1], "env.renderer=none", "agent.observations=[state]").names("MUJOCO_GL=nope")
    assert sheeplike("exp=ppo", "env=gym", "env.id=CartPole-v1").runs, "which is not simulated here"
    monkeypatch.setenv("MUJOCO_GL", " OFF ")
    assert sheeplike(*JOB).runs
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setattr("sheeplike.envs.mjx.options.find_library", lambda library: None)
    assert refused(*JOB).names("MUJOCO_GL=osmesa")


def test_a_sequence_longer_than_the_ring(refused):
    line = refused(*JOB, "agent.replay_size=1600", "env.num_envs=16", "agent.batch_length=99")
    assert line.names("agent.replay_size=1600", "nearest: agent.replay_size=1616")
    line = refused(*JOB, "agent.replay_size=5", "env.num_envs=2", "agent.batch_length=8")
    assert line.names("agent.replay_size=5", "nearest: agent.replay_size=20")


def test_learning_starts_too_early(refused, sheeplike):
    sizes = ("env.num_envs=4", "agent.batch_size=4", "agent.batch_length=9")
    line = refused(*JOB, *sizes, "agent.learning_starts=39")
    assert line.names("agent.learning_starts=39", "40")
    assert "nearest: agent.learning_starts=40" in line
    assert sheeplike(*JOB, *sizes).runs[0].config.agent.learning_starts == 40


def test_learning_starts_before_one_batch(refused, sheeplike):
    sizes = ("env.num_envs=4", "agent.batch_size=8", "agent.batch_length=9")
    assert refused(*JOB, *sizes, "agent.learning_starts=71").names("agent.learning_starts=71", "72")
    assert sheeplike(*JOB, *sizes).runs[0].config.agent.learning_starts == 72


def test_too_short_for_one_update(refused, sheeplike):
    sizes = ("env.num_envs=4", "agent.batch_size=4", "agent.batch_length=9", "agent.replay_ratio=0.25")
    line = refused(*JOB, *sizes, "total_steps=43")
    assert line.names("total_steps=43", "44")
    assert "nearest: total_steps=44" in line
    assert sheeplike(*JOB, *sizes, "total_steps=44").runs


@pytest.mark.parametrize("asked", ["profile=gpu", "fabric.accelerator=cuda", "fabric.accelerator=gpu"])
def test_a_gpu_that_is_not_there(refused, asked):
    line = refused(*JOB, asked)
    assert line.names("fabric.accelerator=cuda, profile=gpu", "NVIDIA")
    assert "nearest: fabric.accelerator=cpu profile=cpu" in line


@pytest.mark.parametrize(
    ("argument", "fact"),
    [
        ("env.cameras=[front", "'env.cameras=[front'"),
        ("=3", "'=3'"),
        ("seed", "'seed'"),
        ("~seed", "'~seed'"),
        ("seed=1,2", "'seed=1,2'"),
        ("seed=range(3)", "'seed=range(3)'"),
        ("--config-dirr=x", "nearest: --config-dir"),
        ("--multrun", "--help, --version, --config-dir"),
        ("--total_steps=100", " total_steps=100"),
        ("--total-steps=100", " total_steps=100"),
        ("-seed=3", " seed=3"),
        ("--exp=ppo", " exp=ppo"),
        ("--exp", "nearest: exp=dreamer_v3"),
        ("--config-dir", "--config-dir"),
        ("env@other=franka_pick", "env@other"),
        ("hydra.run.dir=x", "'hydra.run.dir'"),
        ("agent.learning_rate=${nothing}", "nothing"),
        ("agent.learning_rate=???", "agent.learning_rate"),
    ],
)
def test_syntax(refused, argument, fact):
    assert fact in refused(*JOB, argument)


@pytest.mark.parametrize("key", ["run_dir", "resume"])
def test_a_home_directory_that_is_not_there(refused, key):
    assert "nearest: './~nouser/x'" in refused(*JOB, f"{key}=~nouser/x")


@pytest.mark.parametrize(
    "defaults",
    ["", " ppo", " {a: 1}", " [1]", " [{override /agent: [ppo]}]", " [mine, {override /agent: ppo}]"],
)
def test_a_recipe_whose_defaults_are_none(refused, tmp_path, defaults):
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp/mine.yaml").write_text(f"# @package _global_\ndefaults:{defaults}\n")
    line = refused("exp=mine", "env=cartpole_balance", "--config-dir", str(tmp_path))
    assert "'- override /agent: " in line


def test_command(refused):
    line = refused("trian", *JOB)
    assert line.names("'trian'", "train")
    assert "nearest: train" in line


def test_the_traceback_is_there_for_those_who_debug(sheeplike, monkeypatch):
    monkeypatch.setenv("SHEEPLIKE_DEBUG", "1")
    with pytest.raises(CommandError, match="seed=abc"):
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
    assert done.stderr.startswith("sheeplike: agent.replay_ratio=0: ")
    assert done.stderr.count("\n") == 1


def test_construction_errors_become_one_line():
    with pytest.raises(CommandError, match=r"'frnt'.*front$"), as_command_errors(ValueError):
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
        ("agent.minibatches=7", ["env.num_envs=64", "agent.rollout_length=32", "nearest: agent.minibatches=8"]),
        ("agent.minibatches=4096", ["2048", "nearest: agent.minibatches=2048"]),
        ("total_steps=2048", ["total_steps=2048", "2112", "nearest: total_steps=2112"]),
        ("learning_starts=100", ["'learning_starts'", "nearest: agent.learning_starts"]),
        ("agent.learning_starts=100", ["agent.learning_starts", "ppo"]),
        ("agent.replay_ratio=1", ["agent.replay_ratio", "ppo", "dreamer_v3"]),
        ("agent.gae_lamda=1", ["'agent.gae_lamda'", "nearest: agent.gae_lambda"]),
        ("agent.return_lambda=0.9", ["ppo", "nearest: agent.gae_lambda"]),
        ("agent.size=1m", ["agent.size", "ppo"]),
        ("agent.policy_layers=[64,0]", ["agent.policy_layers=[64,0]"]),
        ("agent.policy_layers=[]", ["agent.policy_layers=[]"]),
        ("agent.policy_layers=wide", ["agent.policy_layers=wide"]),
        ("agent.observations=[1]", ["agent.observations=[1]"]),
        ("agent.vision.layout=natur", ["max_pool, nature", "nearest: agent.vision.layout=nature"]),
        ("agent.vision.head=mean", ["flatten, average, max, spatial_softmax"]),
        ("agent.distribution=normal", ["clipped_normal", "nearest: agent.distribution="]),
        ("agent.kl_control=stop", ["early_stop", "nearest"]),
        ("agent.discount=1", ["agent.discount=1"]),
        ("agent.clip=0", ["agent.clip=0"]),
        ("agent.frame_stack=0", ["nearest: agent.frame_stack=1"]),
        ("agent.name=dreamer_v3", ["agent.name=dreamer_v3", "ppo", "nearest: exp=dreamer_v3"]),
    ],
)
def test_values_of_ppo(refused, override, parts):
    assert refused("exp=ppo", "env=cartpole_balance", override).names(*parts)


def test_a_text_that_the_locale_cannot_read(refused):
    assert refused(*JOB, "run_dir=\udcc3\udcbc").names("run_dir=", "PYTHONUTF8=1")


def test_a_directory_may_have_the_name_of_a_logger(sheeplike):
    assert sheeplike(*JOB, "run_dir=wandb").runs[0].run_dir.name == "wandb"
