"""Families of published models in their target layouts, compared with their programs.

Each case is a tiny random model of transformers; see `tests/maps/cases.py`.
"""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import optax
import pytest

import flaxckpt
from flaxckpt import errors, maps
from flaxckpt.transforms import inverse

_REASON = "needs torch and transformers: `make test-maps` has them"
torch = pytest.importorskip("torch", reason=_REASON)
pytest.importorskip("transformers", reason=_REASON)
safetensors = pytest.importorskip("safetensors.numpy", reason=_REASON)

from tests.maps import decoders, encoders  # noqa: E402
from tests.maps.leaves import flatten, nest  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch, transformers, Tunix

CASES = (*decoders.CASES, *encoders.CASES)


def first_of(*fields):
    """Returns the first case with each value of `fields`, as a parametrization."""
    first = {}
    for case in CASES:
        first.setdefault(tuple(getattr(case, field) for field in fields), case)
    return list(first.values())


def over(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A published model in a directory.

    Attributes:
        model: The model of transformers.
        directory: As `save_pretrained` writes it.
    """

    model: object
    directory: object

    @functools.cached_property
    def tensors(self):
        """The tensors of its file, by leaf path."""
        return flatten(flaxckpt.load(self.directory / "model.safetensors"))

    @property
    def config(self):
        return json.loads((self.directory / "config.json").read_text())


@pytest.fixture(scope="session")
def save(tmp_path_factory):
    """Returns the function that saves the model of a case, once a session."""

    @functools.cache
    def publish(make, seed):
        torch.manual_seed(seed)
        model = make().eval()
        with torch.no_grad():  # norms begin at 1 and biases at 0: swaps would not show
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        directory = tmp_path_factory.mktemp("published")
        model.save_pretrained(directory)
        return Saved(model, directory)

    return lambda case: publish(case.published, 0)


def map_of(case, config, **options):
    family = getattr(maps, case.family)
    return family(config, target=case.target, **case.options, **options)


def state_of(case, saved):
    """Returns the state to fill; of a layout without a program, an abstract one."""
    if case.state is not None:
        return case.state(saved.model.config)
    leaves = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in case.expected(saved.model).items()
    }
    return nest(leaves)


def assert_equal(wanted, found, *, is_exact=True):
    """Asserts equal leaves; if not exact, up to roundings of float32 numbers near 1."""
    rtol, atol = (0, 0) if is_exact else (1e-6, 1e-7)
    assert sorted(wanted) == sorted(found)
    for path, leaf in wanted.items():
        np.testing.assert_allclose(
            found[path], leaf, rtol=rtol, atol=atol, err_msg=path
        )


# ---- values -------------------------------------------------------------------------


@over(CASES)
def test_filled_model_matches_published_outputs(case, save):
    saved = save(case)
    changes = map_of(case, saved.directory)
    state = state_of(case, saved)
    filled = flaxckpt.load(saved.directory, state, transforms=changes)
    if case.expected is not None:
        found = flatten(flaxckpt.load(saved.directory, transforms=changes))
        assert_equal(case.expected(saved.model), found, is_exact=case.is_exact)
    if case.run is not None:
        with torch.no_grad():
            wanted = case.reference(saved.model)
        with jax.default_matmul_precision("highest"):
            found = case.run(filled, saved.model.config)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@over([case for case in CASES if case.target == "maxtext-scanned"])
def test_scanned_layers_are_stacked_single_layers(case, save):
    saved = save(case)
    scanned, single = (
        flatten(flaxckpt.load(saved.directory, transforms=map_of(other, saved.config)))
        for other in (case, dataclasses.replace(case, target="maxtext"))
    )
    block = 6 if case.family == "gemma3" else 1
    layers = re.compile(r"decoder/layers_([0-9]+)/(.*)")
    names = {match[2] for match in map(layers.fullmatch, single) if match}
    count = 1 + max(int(match[1]) for match in map(layers.fullmatch, single) if match)
    whole = count // block * block
    stacked = {path: x for path, x in single.items() if not layers.fullmatch(path)}
    for name in names:
        numbered = [single[f"decoder/layers_{i}/{name}"] for i in range(count)]
        for r in range(block):
            within = f"layers_{r}/" if block > 1 else ""
            scan = np.stack(numbered[r:whole:block], axis=1)
            stacked[f"decoder/layers/{within}{name}"] = scan
        for r, leaf in enumerate(numbered[whole:]):
            stacked[f"decoder/layers_remainder/layers_{r}/{name}"] = leaf
    assert_equal(stacked, scanned)


@over(CASES)
def test_inverse_map_restores_published_tensors(case, save, tmp_path):
    saved = save(case)
    changes = map_of(case, saved.directory)
    filled = flaxckpt.load(saved.directory, state_of(case, saved), transforms=changes)
    flaxckpt.save(tmp_path / "own", filled)
    back = flatten(flaxckpt.load(tmp_path / "own", transforms=inverse(changes)))
    assert_equal(saved.tensors, back, is_exact=case.is_exact)


@over(CASES)
def test_finds_map_by_config_names_and_shapes(case, save):
    saved = save(case)
    assert maps.detect(saved.directory).family.name == case.family
    found = maps.find(saved.directory, state_of(case, saved))
    assert list(map(str, found)) == list(map(str, map_of(case, saved.directory)))


@over(first_of("family", "target"))
def test_moments_follow_their_parameters(case, save, tmp_path):
    saved = save(case)
    changes = map_of(case, saved.directory)
    params = nest(saved.tensors)
    moments = optax.adamw(1e-3).init(params)
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(x.dtype)  # noqa: E731
    adam = moments[0]._replace(
        mu=jax.tree.map(draw, params), nu=jax.tree.map(draw, params)
    )
    state = {**params, "opt_state": (adam, *moments[1:])}
    flaxckpt.save(tmp_path / "published", state)
    mapped = flaxckpt.load(tmp_path / "published", transforms=changes)
    opt_state = mapped.pop("opt_state")
    assert jax.tree.structure(opt_state[0].mu) == jax.tree.structure(mapped)

    # Scaled and shifted parameters have other moments: tests/transforms tests them.
    moves = [c for c in changes if not str(c).startswith(("scale(", "offset("))]
    flaxckpt.save(tmp_path / "mu", adam.mu)
    wanted = flatten(flaxckpt.load(tmp_path / "mu", transforms=moves))
    flaxckpt.save(tmp_path / "moved", state, transforms=moves)
    moved = flaxckpt.load(tmp_path / "moved")
    assert_equal(wanted, flatten(moved["opt_state"][0].mu))

    flaxckpt.save(tmp_path / "mapped", {**mapped, "opt_state": opt_state})
    back = flaxckpt.load(tmp_path / "mapped", state, transforms=inverse(changes))
    assert_equal(flatten(state), flatten(back), is_exact=case.is_exact)


# ---- errors, before a value is read -------------------------------------------------


def plan(case, saved, tensors, tmp_path, **changed):
    """Plans a load of other tensors, or with another configuration."""
    directory = tmp_path / "changed"
    directory.mkdir()
    named = {path.replace("/", "."): leaf for path, leaf in tensors.items()}
    safetensors.save_file(named, directory / "model.safetensors")
    changes = map_of(case, {**saved.config, **changed})
    return flaxckpt.plan(directory, state_of(case, saved), transforms=changes)


@over(first_of("family"))
def test_rejects_config_of_other_family(case, save, tmp_path):
    saved = save(case)
    with pytest.raises(errors.OptionError, match="the config is of a 'parrot'") as e:
        plan(case, saved, saved.tensors, tmp_path, model_type="parrot")
    assert repr(saved.config["model_type"]) in str(e.value)


@over(first_of("family"))
def test_error_names_missing_tensor_and_nearest(case, save, tmp_path):
    saved = save(case)
    tensors = dict(saved.tensors)
    missing = next(path for path in tensors if "/1/" in path)
    tensors[f"{missing}s"] = tensors.pop(missing)
    with pytest.raises(errors.OptionError) as e:
        plan(case, saved, tensors, tmp_path)
    assert f"1 leaf is missing:\n  {missing}; the nearest" in str(e.value)
    assert f"{missing}s" in str(e.value)


@over(first_of("family"))
def test_error_names_extra_tensor(case, save, tmp_path):
    saved = save(case)
    extra = f"{next(path for path in saved.tensors if '/1/' in path)}s"
    tensors = {**saved.tensors, extra: np.zeros(3, np.float32)}
    with pytest.raises(errors.OptionError) as e:
        plan(case, saved, tensors, tmp_path)
    assert f"{extra}: float32[3]" in str(e.value)


def has_heads(case):
    """Returns True if a layout splits queries into heads."""
    rows = getattr(maps, case.family).tables[case.target]
    return any("(h " in (row.form or "") for row in rows)


@over(list(filter(has_heads, first_of("family", "target"))))
def test_rejects_wrong_head_counts(case, save, tmp_path):
    saved = save(case)
    heads = getattr(maps, case.family).sizes["h"]
    changed = {heads.split("|")[0]: saved.config[heads.split("|")[0]] + 5}
    with pytest.raises(errors.OptionError, match=r"contradict|not divisible"):
        plan(case, saved, saved.tensors, tmp_path, **changed)


def look_up(config, key):
    """Returns the value of a key with dots, or None."""
    for part in key.split("."):
        config = (config or {}).get(part)
    return config


def doubled(config, key):
    """Returns a configuration with another size."""
    first, _, rest = key.partition(".")
    value = doubled(config[first], rest) if rest else 2 * config[first]
    return {**config, first: value}


def pattern_of(name):
    """Returns a pattern of the paths for a name with indices: `{i}`, `{m:up|down}`."""
    parts = re.split(r"{(?:\w+:)?(.*?)}", name.replace(".", "/"))
    for at in range(0, len(parts), 2):
        parts[at] = re.escape(parts[at])
    for at in range(1, len(parts), 2):
        parts[at] = f"(?:{parts[at]})" if "|" in parts[at] else "[^/]+"
    return "".join(parts)


@over(first_of("family"))
def test_compares_each_config_size_with_tensors(case, save):
    saved = save(case)
    keys = set()
    for name, axes in getattr(maps, case.family).shapes.items():
        if not any(map(re.compile(pattern_of(name)).fullmatch, saved.tensors)):
            continue
        for axis in axes.split():
            choices = [re.findall(r"[a-z][\w.]*", each) for each in axis.split("|")]
            is_known = [all(look_up(saved.config, k) for k in each) for each in choices]
            if True in is_known:
                keys |= {*choices[is_known.index(True)]}
    assert keys
    for key in keys:
        changes = map_of(case, doubled(saved.config, key))
        with pytest.raises(errors.OptionError, match="contradict"):
            flaxckpt.load(saved.directory, transforms=changes)
