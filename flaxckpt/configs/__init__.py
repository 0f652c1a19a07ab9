"""Checkpoint options of a run as values that can be stored in a file.

```toml
directory = "runs/7"
every_steps = 1000
keep = [{latest = 3}, {best = 1, metric = "eval/loss", mode = "min"}]
layout = {chunk_bytes = "32 MiB", codec = "zstd"}
```

```python
config = CheckpointConfig.from_file("run.toml")
with config.checkpointer() as checkpointer:
    on_step = config.callback(checkpointer, dataset=batches)
    state, start = config.restore_or_init(on_step, state)
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flaxckpt import _doors

if TYPE_CHECKING:
    from flaxckpt.configs._config import Cast, CheckpointConfig
    from flaxckpt.configs._policies import parse_option as parse_option

__all__ = ["Cast", "CheckpointConfig"]

if not TYPE_CHECKING:
    __getattr__ = _doors.opener(
        __name__,
        names=dict.fromkeys(__all__, "_config") | {"parse_option": "_policies"},
    )
