"""The cases, one module each."""

from collections.abc import Callable
from typing import TypeAlias

from benchmarks.cases import (
    broadcast,
    buckets,
    flat_files,
    frozen,
    gpu,
    imports,
    loop,
    memory,
    overlap,
    planning,
    processes,
    reshard,
    steps,
    tier,
    tiny,
    train_state,
)
from benchmarks.samples import Rows, Settings

Case: TypeAlias = Callable[[Settings], Rows]

CASES: dict[str, Case] = {
    module.CASE: module.run
    for module in (
        train_state,
        memory,
        tiny,
        steps,
        loop,
        frozen,
        flat_files,
        imports,
        planning,
        overlap,
        processes,
        tier,
        reshard,
        buckets,
        broadcast,
        gpu,
    )
}
