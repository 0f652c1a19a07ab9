"""Trains with a learning rate that grows until the loss is NaN, for a picture of it.

python docs/recorder.py writes docs/recorder.png, the flight recorder of the report. It
needs Playwright, and Chromium on the path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from playwright import sync_api

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import flaxckpt  # noqa: E402
from examples import report as example  # noqa: E402
from flaxckpt.policies import BestN, EveryNSteps, LatestN  # noqa: E402

CLASSES, STEPS, STOPPED_AT = 10, 150, 60
KEEP = (LatestN(3), BestN(1, "eval/loss", "min"), EveryNSteps(50))
OTHERS = "header > .title, button.theme, .cards, nav"
"""What is above the recorder, and not in the picture."""


def train(directory: Path, stop_at: int) -> None:
    """Trains up to a step, from the newest one that was saved."""
    model = example.Classifier(CLASSES)
    params = model.init(jax.random.key(0), jnp.zeros((1, example.FEATURES)))["params"]
    growing = optax.exponential_decay(0.01, 300, 1e4)
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(growing)
    )
    with flaxckpt.Checkpointer(directory, keep=KEEP) as run:
        on_step = flaxckpt.CheckpointCallback(
            run, every_steps=10, statistics=True, check_step=False
        )
        state, start = on_step.restore_or_init(state)
        for step in range(start + 1, stop_at + 1):
            state, _ = example.train_step(state, example.make_batch(CLASSES, step))
            loss, _ = example.evaluate(state, example.make_batch(CLASSES, 0))
            on_step(step, state, metrics={"eval/loss": float(loss)})


def draw(page: sync_api.Page, file: Path) -> None:
    """Takes the picture of a page."""
    page.goto(file.as_uri())
    page.locator("#recorder canvas").first.wait_for()
    page.evaluate(
        "names => document.querySelectorAll(names).forEach(each => each.remove())",
        OTHERS,
    )
    box = page.locator("#recorder").bounding_box()
    assert box is not None
    clip: sync_api.FloatRect = {
        "x": 0,
        "y": 0,
        "width": 1280,
        "height": box["y"] + box["height"] + 14,
    }
    page.screenshot(path=ROOT / "docs/recorder.png", clip=clip, full_page=True)


def main() -> None:
    """Writes the picture."""
    with tempfile.TemporaryDirectory() as folder, sync_api.sync_playwright() as play:
        run, file = Path(folder, "lr-grows"), Path(folder, "report.html")
        train(run, STOPPED_AT)
        train(run, STEPS)
        words = ["report", str(run), "-o", str(file), "--no-diff"]
        subprocess.run([sys.executable, "-m", "flaxckpt", *words], cwd=ROOT, check=True)
        path = shutil.which("chromium")
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        draw(browser.new_page(viewport={"width": 1280, "height": 900}), file)
        browser.close()


if __name__ == "__main__":
    main()
