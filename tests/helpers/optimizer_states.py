"""States whose optimizer leaves encode their origin, and changes of such states.

`Tags` gives every leaf of an optimizer a number for its origin: the optimizer, its
transform, the field and the parameter. So the value of a leaf shows its origin,
independently of the matching in flaxckpt.
"""

import dataclasses
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from flax.training import train_state
from hypothesis import strategies as st

import flaxckpt

# ---- parameters -------------------------------------------------------------------


class Pair(NamedTuple):
    """Parameters, some with the names of fields of transforms."""

    mu: Any
    b: Any


class Other(NamedTuple):
    """A `Pair` with another name for one parameter."""

    mu: Any
    c: Any


@flax.struct.dataclass
class Layer:
    """A `Pair` of another kind."""

    mu: Any
    b: Any


@flax.struct.dataclass
class OtherLayer:
    """A `Layer` with another name for one parameter."""

    mu: Any
    c: Any


class Trace(NamedTuple):
    """Parameters with names of fields of a transform's state."""

    trace: Any
    count: Any


MAKERS = {
    "dict": lambda **named: named,
    "frozen": lambda **named: FrozenDict(named),
    "named tuple": lambda **named: pair(**named),
    "dataclass": lambda **named: layer(**named),
}


def pair(**named):
    if "trace" in named:
        return Trace(**named)
    return Other(**named) if "c" in named else Pair(**named)


def layer(**named):
    if "trace" in named:
        return dict(named)
    return OtherLayer(**named) if "c" in named else Layer(**named)


def params_of(kind, *, renamed=False):
    """Returns 5 parameters in containers of a kind; with `renamed`, b is c."""
    make = MAKERS[kind]
    last = "c" if renamed else "b"
    return make(
        trace=make(mu=jnp.full((2, 3), 0.5), **{last: jnp.full(3, 0.5)}),
        count={"w": jnp.full((4,), 0.5), "nu": [jnp.full((2,), 0.5), jnp.full(2, 0.5)]},
    )


def other_params_of(kind):
    """Returns parameters, some with paths and shapes as from `params_of`."""
    make = MAKERS[kind]
    return make(
        trace=make(mu=jnp.full((2, 3), 0.5), b=jnp.full(3, 0.5)),
        count={"w": jnp.full((4,), 0.5), "z": jnp.full((5,), 0.5)},
    )


class Model(nnx.Module):
    """A module with the parameters of `params_of`, except the list."""

    def __init__(self):
        self.mu = nnx.Param(jnp.full((2, 3), 0.5))
        self.trace = nnx.Dict({"mu": nnx.Param(jnp.full(3, 0.5))})


def name_of(path):
    """Returns a leaf path that is equal for all classes of containers."""
    parts = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    parts = [
        str(key.idx if part is None else part)
        for key, part in zip(path, parts, strict=True)
    ]
    return "/".join(part for part in parts if part not in ("value", "raw_value"))


# ---- origins ----------------------------------------------------------------------


class Origin(NamedTuple):
    """The origin of a value.

    Attributes:
        optimizer: The name of the optimizer.
        transform: The name of its transform.
        field: The field of the transform's state.
        param: The path of the parameter; empty for a counter.
    """

    optimizer: str
    transform: str
    field: str
    param: str


class Tags:
    """Numbers that encode origins."""

    FIRST = 10_000

    def __init__(self):
        self._origins = []

    def number(self, origin):
        """Returns the number of an origin."""
        if origin not in self._origins:
            self._origins.append(origin)
        return self.FIRST + self._origins.index(origin)

    def origin(self, leaf):
        """Returns the origin that the values of a leaf encode, or None."""
        values = set(np.asarray(leaf).ravel().tolist())
        assert len(values) == 1, values
        n = int(values.pop()) - self.FIRST
        return self._origins[n] if 0 <= n < len(self._origins) else None


# ---- optimizers -------------------------------------------------------------------


class MyState(NamedTuple):
    """A user's transform with the fields of Adam's."""

    count: Any
    mu: Any
    nu: Any


def mine():
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MyState(jnp.zeros((), jnp.int32), zeros, zeros)

    return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


TRANSFORMS = {
    "adam": optax.scale_by_adam,
    "belief": optax.scale_by_belief,
    "mine": mine,
    "lion": optax.scale_by_lion,
    "trace": lambda: optax.trace(0.9),
    "ema": lambda: optax.ema(0.9),
    "rms": optax.scale_by_rms,
    "schedule": lambda: optax.scale_by_schedule(lambda n: n),
    "clip": lambda: optax.clip(1.0),
    "inject": lambda: optax.inject_hyperparams(optax.scale)(0.5),
}
LIKE_ADAM = frozenset(("belief", "mine"))
"""Transforms whose states have Adam's fields, which Orbax cannot distinguish."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A transform in a chain.

    Attributes:
        kind: The kind of the transform.
        name: The name in origins.
        wrapper: `mask` excludes some parameters; `label` has one transform of this kind
            for each of two groups; `steps` applies it every other step.
    """

    kind: str
    name: str
    wrapper: str = ""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        parts: The transforms.
        form: `chain`, `named` (a chain with names), `nested` (a chain in a chain).
        wrapper: The wrapper of the chain: as for `Part`, and `finite`.
    """

    parts: tuple[Part, ...]
    form: str = "chain"
    wrapper: str = ""

    def transform(self, name, tags=None):
        """Returns the optax transform; with `tags`, `init` returns tagged leaves."""
        transforms = [
            wrapped(part.wrapper, elementary(part, name, tags)) for part in self.parts
        ]
        if self.form == "named":
            pairs = zip(self.parts, transforms, strict=True)
            tx = optax.named_chain(*((part.name, tx) for part, tx in pairs))
        elif self.form == "nested" and len(transforms) > 1:
            tx = optax.chain(transforms[0], optax.chain(*transforms[1:]))
        else:
            tx = optax.chain(*transforms) if len(transforms) != 1 else transforms[0]
        return wrapped(self.wrapper, lambda _: tx)


def elementary(part, optimizer, tags):
    def make(label):
        tx = TRANSFORMS[part.kind]()
        if tags is None:
            return tx

        def tagged(path, leaf):
            field, _, param = name_of(path).partition("/")
            origin = Origin(optimizer, part.name, field, param)
            return jnp.full_like(leaf, tags.number(origin))

        def init(params):
            return jax.tree_util.tree_map_with_path(tagged, tx.init(params))

        return optax.GradientTransformation(init, tx.update)

    return make


def of_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def wrapped(wrapper, make):
    match wrapper:
        case "mask":
            return optax.masked(make(""), of_matrices)
        case "label":
            return optax.multi_transform(
                {"matrix": make("matrix"), "rest": make("rest")},
                lambda params: jax.tree.map(
                    lambda p: "matrix" if p.ndim > 1 else "rest", params
                ),
            )
        case "steps":
            return optax.MultiSteps(make(""), 2).gradient_transformation()
        case "finite":
            return optax.apply_if_finite(make(""), 2)
        case _:
            return make("")


# ---- states -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """The structure of a state.

    Attributes:
        kind: The class of the parameters' containers.
        form: The places of the parameters and optimizers.
        is_twin: True if two networks have equal parameters.
    """

    kind: str
    form: str
    is_twin: bool = True

    @property
    def names(self):
        """The names of the optimizers."""
        several = ("one key", "tuple", "pair", "beside", "list", "states", "critic")
        return ("g", "d") if self.form in several else ("g",)

    def state(self, optimizers, tags=None, *, renamed=False):
        """Creates the state with these optimizers, given by name."""
        txs = {name: optimizers[name].transform(name, tags) for name in self.names}
        if self.form == "nnx":
            model = Model()
            return model, nnx.Optimizer(model, txs["g"], wrt=nnx.Param)
        params = {"g": params_of(self.kind, renamed=renamed)}
        if "d" in txs:
            params["d"] = params["g"] if self.is_twin else other_params_of(self.kind)
        states = {name: tx.init(params[name]) for name, tx in txs.items()}
        create = train_state.TrainState.create
        match self.form:
            case "train state":
                return create(apply_fn=None, params=params["g"], tx=txs["g"])
            case "bare":
                return {"params": params["g"], "opt": states["g"]}
            case "average":
                average = jax.tree.map(jnp.copy, params["g"])
                return {
                    "params": params["g"],
                    "average": average,
                    "opt_state": states["g"],
                }
            case "only":
                return {"opt_state": states["g"]}
            case "one key":
                return {"params": params, "opt_state": states}
            case "tuple":
                return {"params": params, "opt_state": tuple(states.values())}
            case "pair":
                return (tuple(params.values()), tuple(states.values()))
            case "beside":
                return {**params, "opt": tuple(states.values())}
            case "critic":
                return {
                    "params": params["g"],
                    "critic": params["d"],
                    "opt": tuple(states.values()),
                }
            case "list":
                return {"params": params, "opt": list(states.values())}
            case "states":
                return {
                    name: create(apply_fn=None, params=params[name], tx=txs[name])
                    for name in txs
                }
        raise AssertionError(self.form)


FORMS = (
    *("train state", "bare", "average", "only", "nnx"),
    *("one key", "tuple", "pair", "beside", "critic", "list", "states"),
)

layouts = st.builds(
    Layout, st.sampled_from(sorted(MAKERS)), st.sampled_from(FORMS), st.booleans()
)


# ---- changes ----------------------------------------------------------------------


def optimizers(kinds=tuple(TRANSFORMS)):
    """Returns a strategy of optimizers with up to 3 transforms, some of equal kind."""

    def optimizer(kinds, wrappers, form, wrapper):
        parts = [
            Part(kind, f"{kind}{n}", wrappers[n])
            for n, kind in enumerate([*kinds, *kinds[:1] * (form == "chain")][:3])
        ]
        return Optimizer(tuple(parts), form, wrapper)

    wrappers = st.lists(
        st.sampled_from(["", "", "", "mask", "label", "steps"]), min_size=3, max_size=3
    )
    return st.builds(
        optimizer,
        st.lists(st.sampled_from(kinds), min_size=1, max_size=3),
        wrappers,
        st.sampled_from(["chain", "chain", "named", "nested"]),
        st.sampled_from(["", "", "steps", "finite", "mask", "label"]),
    )


@st.composite
def changed(draw, optimizer, kinds=tuple(TRANSFORMS)):
    """Draws the optimizer with transforms either added or removed, and other wrappers.

    Not both, because a new transform cannot be distinguished from a removed transform
    of its kind. For the same reason, transforms of one kind keep their order.
    """
    parts = list(optimizer.parts)
    if draw(st.booleans()):
        for n in range(draw(st.integers(0, 2))):
            kind = draw(st.sampled_from(kinds))
            parts.insert(draw(st.integers(0, len(parts))), Part(kind, f"new{n}"))
    else:
        for _ in range(draw(st.integers(0, len(parts) - 1))):
            parts.pop(draw(st.integers(0, len(parts) - 1)))
    if len({part.kind for part in parts}) == len(parts):
        parts = draw(st.permutations(parts))
        wrappers = st.sampled_from(["", "mask", "label", "steps"])
        parts = [
            dataclasses.replace(part, wrapper=draw(wrappers))
            if draw(st.booleans())
            else part
            for part in parts
        ]
    form, wrapper = optimizer.form, optimizer.wrapper
    if draw(st.booleans()):
        form = draw(st.sampled_from(["chain", "named", "nested"]))
    if draw(st.booleans()):
        wrapper = draw(st.sampled_from(["", "steps", "finite", "mask", "label"]))
    return Optimizer(tuple(parts), form, wrapper)


def save_with(writer, path, state):
    """Saves with `flaxckpt`, with roles, or with `orbax`, without roles."""
    if writer == "flaxckpt":
        flaxckpt.save(path, state)
        return
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
