"""Options of a run are read from files, round-trip, and are validated by name."""

import inspect
import json
import re
import tomllib

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict, FrozenConfigDict

import flaxckpt
from flaxckpt import configs, errors
from flaxckpt.configs import Cast, CheckpointConfig
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import (
    BestN,
    EveryNSecs,
    EveryNSteps,
    EveryNStepsClosest,
    ExponentialSteps,
    LatestDuration,
    LatestN,
    OnSteps,
    WithoutMetric,
)
from tests import ROOT
from tests.helpers import any_policy, chunks, command_line

FULL = """\
directory = "runs/7"
keep = [
    {latest = 3},
    {best = 1, metric = "eval/loss", mode = "min"},
    {without_metric = "eval/loss"},
    {every_steps = 10000},
    {every_steps_closest = 5000},
    {exponential_steps = 100, base = 3},
    {latest_duration = "2 d"},
    {every_secs = "1 h"},
    {on_steps = [10, 1]},
]
keep_dataset = [{latest = 1}]
layout = {chunk_bytes = "32 MiB", codec = "zstd", checksum = false}
save_dtype = [{pattern = "params/.*", dtype = "bfloat16"}]
max_concurrent_bytes = "1.5 GB"
step_format = "step_{step}"
peer_timeout_secs = "20 min"
read_once = true
permissions = "0o750"
every_steps = 1000
every_secs = "15 min"
temporary = true
on_steps = [5, 2]
on_preemption = false
grace_secs = 30
exit_code = "none"
save_first = true
save_last = false
step_is = "index"
check_step = false
preflight = "warn"
"""

CONFIG = CheckpointConfig(
    directory="runs/7",
    keep=(
        LatestN(3),
        BestN(1, "eval/loss", "min"),
        WithoutMetric("eval/loss"),
        EveryNSteps(10000),
        EveryNStepsClosest(5000),
        ExponentialSteps(100, 3),
        LatestDuration(172800),
        EveryNSecs(3600.0),
        OnSteps((1, 10)),
    ),
    keep_dataset=(LatestN(1),),
    layout=flaxckpt.ArrayLayout(chunk_bytes=32 * 2**20, codec="zstd", checksum=False),
    save_dtype=(Cast("params/.*", "bfloat16"),),
    max_concurrent_bytes=1_500_000_000,
    step_format="step_{step}",
    peer_timeout_secs=1200.0,
    read_once=True,
    permissions=0o750,
    every_steps=1000,
    every_secs=900.0,
    temporary=True,
    on_steps=(2, 5),
    on_preemption=False,
    grace_secs=30.0,
    exit_code=None,
    save_first=True,
    save_last=False,
    step_is="index",
    check_step=False,
    preflight="warn",
)

# ---- coverage --------------------------------------------------------------------

# Options that a file cannot have, and the reasons.
NO_DATA = {
    "transforms": "functions; casts are in save_dtype",
    "metadata": "what a run is, where a config says how it is saved",
    "json": "what a run is, as metadata",
    "sinks": "objects",
    "metrics_from": "a function",
    "failure_domain": "a function",
    "checkpointer": "an object",
    "dataset": "an object",
    "clock": "a function",
}


@pytest.mark.parametrize(
    "cls",
    [flaxckpt.Checkpointer, flaxckpt.CheckpointCallback],
    ids=lambda c: c.__name__,
)
def test_config_contains_every_data_option(cls):
    options = inspect.signature(cls).parameters
    assert options.keys() - NO_DATA <= set(CheckpointConfig.__slots__)
    config = CheckpointConfig()
    for name, option in options.items():
        if name not in NO_DATA and option.default not in (
            inspect.Parameter.empty,
            None,
        ):
            assert getattr(config, name) == option.default, name


def test_every_layout_field_is_option():
    found = CheckpointConfig.from_mapping({"layout": {"zarr_version": 2}}).layout
    assert found == flaxckpt.ArrayLayout(zarr_version=2)
    with pytest.raises(errors.OptionError) as error:
        CheckpointConfig.from_mapping({"layout": {"?": 1}})
    for name in flaxckpt.ArrayLayout.__slots__:
        assert name in str(error.value)


def test_the_guide_lists_every_policy_and_its_forms():
    rows = any_policy.in_guide()
    assert [name for name, _, _ in rows] == [c.__name__ for c in any_policy.CLASSES]
    refused = command_line.run("ls", ".", "--keep=newest", code=2)
    for name, option, table in rows:
        policy = configs.parse_option("keep", option)
        assert type(policy).__name__ == name
        assert option in refused
        raw = tomllib.loads(f"keep = [{table}]")
        assert CheckpointConfig.from_mapping(raw).keep == (policy,), name
        written = CheckpointConfig(keep=[policy]).to_mapping()["keep"]
        assert CheckpointConfig.from_mapping({"keep": written}).keep == (policy,)


def test_documentation_shows_every_option():
    document = ROOT / "docs/configuration.md"
    blocks = re.findall(r"```toml\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    shown = {
        name: value for block in blocks for name, value in tomllib.loads(block).items()
    }
    assert shown.keys() == set(CheckpointConfig.__slots__)
    slots = set(flaxckpt.ArrayLayout.__slots__)
    assert shown["layout"].keys() == slots - {"store"}, "it has no effect any more"
    CheckpointConfig.from_mapping(shown)


# ---- files -----------------------------------------------------------------------


def test_toml_yaml_json_and_python_configs_are_equal(tmp_path):
    (tmp_path / "a.toml").write_text(FULL)
    mapping = CheckpointConfig.from_file(tmp_path / "a.toml").to_mapping()
    (tmp_path / "b.yaml").write_text(yaml.safe_dump(mapping))
    (tmp_path / "c.json").write_text(json.dumps(mapping))
    (tmp_path / "d.yml").write_text(yaml.safe_dump({"a": {"b": mapping}, "c": 1}))
    files = {"a.toml": None, "b.yaml": None, "c.json": None, "d.yml": "a.b"}
    for name, group in files.items():
        assert CheckpointConfig.from_file(tmp_path / name, group=group) == CONFIG


whole = st.integers(1, 10**6)
secs = st.floats(1e-3, 1e9)
policies = any_policy.any_policy(
    n=whole,
    base=st.integers(2, 100),
    secs=secs,
    steps=st.lists(whole, max_size=3),
    metric=st.text(min_size=1),
)
any_config = st.builds(
    CheckpointConfig,
    directory=st.none() | st.text(min_size=1),
    keep=st.lists(policies, max_size=4),
    keep_dataset=st.lists(policies, max_size=2),
    layout=st.builds(
        flaxckpt.ArrayLayout,
        chunk_bytes=whole,
        codec=st.sampled_from(["none", "compact", "zstd"]),
        checksum=st.booleans(),
        zarr_version=st.sampled_from([2, 3]),
        shard_axes=st.sampled_from([(), 1, (0, -1)]),
    ),
    save_dtype=st.lists(
        st.builds(
            Cast,
            st.sampled_from([".*", "params/(a|b)"]),
            st.sampled_from(["bfloat16", "int8"]),
            st.booleans(),
        ),
        max_size=2,
    ),
    max_concurrent_bytes=whole,
    step_format=st.sampled_from(["{step}", "step_{step}", "{step:08d}"]),
    read_only=st.booleans(),
    peer_timeout_secs=secs,
    read_once=st.booleans(),
    permissions=st.none() | st.sampled_from([0o700, 0o750, 0o777]),
    every_steps=st.none() | whole,
    every_secs=secs,
    temporary=st.booleans(),
    on_steps=st.lists(whole, max_size=3),
    on_preemption=st.booleans(),
    grace_secs=st.none() | secs,
    exit_code=st.none() | st.integers(0, 255),
    save_first=st.booleans(),
    save_last=st.booleans(),
    step_is=st.sampled_from(["completed", "index"]),
    check_step=st.booleans(),
    preflight=st.sampled_from([True, False, "warn"]),
)


@given(any_config)
def test_mapping_round_trips_through_json_and_yaml(config):
    mapping = config.to_mapping()
    assert CheckpointConfig.from_mapping(mapping) == config
    assert CheckpointConfig.from_mapping(json.loads(json.dumps(mapping))) == config
    assert CheckpointConfig.from_mapping(yaml.safe_load(yaml.safe_dump(mapping))) == (
        config
    )


def test_default_config_writes_nothing():
    assert CheckpointConfig.from_mapping({}) == CheckpointConfig()
    assert CheckpointConfig().to_mapping() == {}


@pytest.mark.parametrize(
    ("kind", "policy"), [(ConfigDict, {"latest": 2}), (FrozenConfigDict, LatestN(2))]
)
def test_reads_config_dicts(kind, policy):
    group = {"every_steps": 5, "layout": {"codec": "zstd"}, "keep": [policy]}
    whole = kind({"checkpoint": group, "directory": "run"})
    config = CheckpointConfig.from_mapping(whole.checkpoint)
    assert config.every_steps == 5
    assert config.layout.codec == "zstd"
    assert config.keep == (LatestN(2),)


def test_follows_references_in_config_dict():
    whole = ConfigDict({"every": 5})
    whole.checkpoint = ConfigDict({"every_steps": whole.get_ref("every")})
    whole.every = 7
    assert CheckpointConfig.from_mapping(whole.checkpoint).every_steps == 7


# ---- errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"every_step": 5}, "every_step is not an option; did you mean every_steps?"),
        (
            {"layout": {"code": 1}},
            "layout.code is not an option; did you mean layout.codec?",
        ),
        (
            {"keep": [{"lates": 1}]},
            r"keep\[0\].lates is not an option; did you .*latest?",
        ),
        ({"max_to_keep": 3}, r"max_to_keep .*; write .* keep = \[{latest = 3}\]"),
        ({"save_interval_steps": 9}, "not an option; write every_steps = 1000"),
        ({"xyz": 1}, "xyz is not an option; the options are directory, keep"),
        ({"keep": {"latest": 1}}, "keep must be a list, found .*dict"),
        ({"keep": [3]}, r"keep\[0\] must be a table, found 3 \(int\)"),
        ({"keep": [{}]}, r"keep\[0\] must have one of latest, .*on_steps"),
        ({"keep": [{"exponential_steps": 1}]}, "exponential_steps also base"),
        ({"keep": [{"latest": 1, "base": 2}]}, r"keep\[0\] must have one of"),
        ({"keep": [{"latest": 1, "best": 1}]}, r"keep\[0\] must have one of"),
        ({"keep": [{"best": 1, "metric": "loss"}]}, "best also metric and mode"),
        ({"keep": [{"latest": 1, "metric": "loss"}]}, "best also metric and mode"),
        (
            {"keep": [{"best": 1, "metric": "loss", "mode": "least"}]},
            r"keep\[0\].mode must be one of 'min', 'max', found 'least' \(str\)",
        ),
        ({"keep": [{"latest": 0}]}, r"keep\[0\].latest must be a whole number of"),
        ({"keep_dataset": [{"every_secs": -1}]}, r"keep_dataset\[0\].every_secs must"),
        ({"every_steps": "many"}, r"every_steps must be .*, found 'many' \(str\)"),
        ({"every_steps": True}, r"every_steps must be .*, found True \(bool\)"),
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1"),
        ({"every_steps": 1.5}, r"found 1.5 \(float\)"),
        ({"every_secs": "5 minutes"}, "a string such as '15 min', found '5 minutes'"),
        ({"every_secs": float("nan")}, "every_secs must be a positive number"),
        ({"every_secs": "1.2.3"}, "every_secs must be a positive number"),
        ({"layout": {"chunk_bytes": "0.3 B"}}, "layout.chunk_bytes must be a whole"),
        ({"layout": {"shard_axes": "0"}}, "layout.shard_axes must be an axis"),
        ({"layout": {"shard_axes": [0.5]}}, r"layout.shard_axes\[0\] must be"),
        ({"layout": {"zarr_version": True}}, "layout.zarr_version must be one of 2, 3"),
        ({"layout": [1]}, "layout must be a table"),
        ({"save_dtype": [{"pattern": ".*"}]}, r"save_dtype\[0\].dtype is missing"),
        ({"save_dtype": [{"pattern": "(", "dtype": "int8"}]}, r"save_dtype\[0\]: .*\("),
        ({"save_dtype": [{"pattern": ".*", "dtype": "floaty"}]}, "floaty"),
        ({"read_only": 1}, r"read_only must be true or false, found 1 \(int\)"),
        ({"directory": 7}, r"directory must be a path, found 7 \(int\)"),
        ({"step_format": "{number}"}, "step_format must contain {step}"),
        ({"on_steps": 5}, "on_steps must be a list"),
        ({"on_steps": [-5]}, r"on_steps\[0\] must be a whole number"),
        ({"step_is": "epoch"}, "step_is must be one of 'completed', 'index'"),
        ({"preflight": 1}, "preflight must be one of True, False, 'warn'"),
        ({"temporary": True}, "temporary applies to the saves of every_secs"),
        ([1], "the config must be a table"),
    ],
)
def test_error_names_invalid_option(mapping, message):
    with pytest.raises(errors.OptionError, match=message):
        CheckpointConfig.from_mapping(mapping)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "[run.ckpt]\nkep = []", "a.toml: run.ckpt.kep is not an option"),
        ("a.toml", "[run]\n", "a.toml has no table 'run.ckpt'"),
        ("a.toml", "[run", "a.toml is not valid TOML: "),
        ("a.yaml", "run: {ckpt: [", "a.yaml is not valid YAML: "),
        ("a.json", '{"run": 1}', "a.json has no table 'run.ckpt'"),
        ("a.ini", "", "a.ini must be a TOML, YAML or JSON file"),
        ("a.json", None, "a.json cannot be read: "),
    ],
)
def test_error_names_unusable_file(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(errors.OptionError, match=message):
        CheckpointConfig.from_file(tmp_path / name, group="run.ckpt")


def test_custom_policy_is_used_but_not_written(tmp_path):
    class Primes:
        def preserved(self, checkpoints):
            return {2, 3}

        def __str__(self):
            return "Primes"

    config = CheckpointConfig(directory=tmp_path, keep=[Primes()])
    with config.checkpointer() as ckpt:
        for step in range(6):
            ckpt.save(step, {"w": np.ones(1)})
        ckpt.wait()
        assert ckpt.steps() == [2, 3, 5]
    with pytest.raises(errors.OptionError, match=r"keep\[0\] is Primes"):
        config.to_mapping()


# ---- behavior --------------------------------------------------------------------


def test_run_follows_its_config(tmp_path):
    config = CheckpointConfig.from_mapping(
        {
            "directory": str(tmp_path),
            "keep": [{"latest": 1}, {"on_steps": [2]}],
            "layout": {"zarr_version": 2},
            "save_dtype": [{"pattern": "w", "dtype": "bfloat16"}],
            "step_format": "step_{step}",
            "every_steps": 2,
            "step_is": "index",
            "save_last": False,
        }
    )
    batches = StepIndexed(lambda i: i)
    with config.checkpointer() as checkpointer:
        on_step = config.callback(checkpointer, dataset=batches)
        saved = [i for i in range(7) if on_step(i, {"w": 1.5 * np.ones(3)})]
    assert saved == [1, 3, 5]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_2", "step_6"]
    metadata = checkpointer.metadata(6)
    assert metadata.leaves["w"].dtype == "bfloat16"
    assert (tmp_path / "step_6/dataset").is_dir()
    assert "w/.zarray" in chunks.read_tree(tmp_path / "step_6/state")


def test_call_options_override_config(tmp_path):
    config = CheckpointConfig(keep=[LatestN(1)], every_steps=1)
    with pytest.raises(errors.OptionError, match="has no directory"):
        config.checkpointer()
    with config.checkpointer(tmp_path, keep=[LatestN(2)]) as checkpointer:
        on_step = config.callback(checkpointer, every_steps=2)
        for step in range(1, 9):
            on_step(step, {"n": step})
    assert checkpointer.steps() == [6, 8]


def test_call_transforms_precede_config_casts(tmp_path):
    config = CheckpointConfig(save_dtype=[Cast("b", "float16")])
    with config.checkpointer(
        tmp_path, transforms=[flaxckpt.transforms.rename("a", "b")]
    ) as checkpointer:
        checkpointer.save(1, {"a": np.ones(2, np.float32)})
    assert checkpointer.metadata(1).leaves["b"].dtype == "float16"
