"""A small run with data for all sections of a report, and a parser of the page."""

import html.parser
import json
import re
import tempfile
from pathlib import Path

import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import flaxckpt
from flaxckpt.datasets import StepIndexed
from flaxckpt.policies import BestN, EveryNSteps, LatestN
from flaxckpt.transforms import drop
from tests.helpers import command_line
from tests.helpers.files import largest_file

KEEP = (LatestN(3), BestN(2, "eval/loss", "min"), EveryNSteps(40))
KEEP_OPTIONS = ("-k", "latest:3", "-k", "best:2:eval/loss:min", "-k", "every:40")
LOSSES = {10: 0.9, 20: 0.4, 30: 0.7, 40: 0.6, 50: 0.3, 60: 0.5, 70: 0.55, 80: 0.52}
LASTS = {20, 40, 50, 60, 70, 80}
"""The steps that are kept."""


def state_at(step, classes=3):
    params = {
        "trunk": {"kernel": jnp.full((32, 16), 1 + step / 100), "bias": jnp.zeros(16)},
        "head": jnp.full((16, classes), float(step)),
    }
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    return state.replace(step=step)


def make_run(root):
    """Creates a run that started from another, was resumed, and deleted steps."""
    flaxckpt.save(root / "source", state_at(0, classes=5))
    batches = StepIndexed(lambda index: index)
    with flaxckpt.Checkpointer(root / "run", keep=KEEP) as run:
        on_step = flaxckpt.CheckpointCallback(run, every_steps=10, check_step=False)
        on_step.restore_or_init(
            state_at(0),
            source=root / "source",
            source_transforms=[drop("params/head")],
            missing="init",
        )
        for step, loss in LOSSES.items():
            for _ in range(10):
                next(batches)
            metrics = {"eval/loss": loss, "eval/accuracy": 1 - loss / 2}
            run.save(step, state_at(step), metrics=metrics, dataset=batches).wait()
    with flaxckpt.Checkpointer(root / "run", keep=KEEP) as run:
        run.restore()
    return root / "run"


def damage(step_directory):
    """Removes one byte of an array."""
    largest = largest_file(step_directory / "state")
    largest.write_bytes(largest.read_bytes()[:-1])


def page_of(path, *options, code=0):
    """Returns the page that `flaxckpt report` writes for a run or a checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.html"
        command_line.run("report", path, "--output", file, *options, code=code)
        return file.read_text(encoding="utf-8")


def charts_of(page):
    """Returns the data that the script of a page draws."""
    [text] = re.findall("<div data-charts hidden>(.*?)</div>", page, re.DOTALL)
    data = json.loads(text)
    for each in [data.get("saves", {}), *data.get("metrics", ())]:
        each.setdefault("x", data.get("steps", {}).get("x"))
    return data


class Elements(html.parser.HTMLParser):
    """All elements of a page: tag, attributes, and direct text."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])

    def handle_data(self, data):
        if self.found:
            self.found[-1][2] += data

    def with_data(self, *names):
        """Returns the attributes of elements that have all of `names`."""
        return [given for _, given, _ in self.found if all(n in given for n in names)]
