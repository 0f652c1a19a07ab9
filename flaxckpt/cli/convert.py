"""`flaxckpt convert`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from flaxckpt import _arrays, errors
from flaxckpt.cli import _app, _output

_Patterns = list[str] | None


@_app.verb
def convert(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A checkpoint, or a run directory.")
    ],
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="Path of the new checkpoint.")
    ],
    format: Annotated[
        Literal["orbax", "safetensors", "msgpack"] | None,
        typer.Option(
            "--format",
            "-f",
            help="By default from the suffix of DST, else orbax.",
            show_default=False,
        ),
    ] = None,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    only: Annotated[
        _Patterns,
        typer.Option("--only", metavar="PATTERN", help="Leaves to keep."),
    ] = None,
    drop: Annotated[
        _Patterns,
        typer.Option("--drop", metavar="PATTERN", help="Leaves to drop."),
    ] = None,
    rename: Annotated[
        _Patterns,
        typer.Option(
            "--rename", metavar="PATTERN=NAME", help=r"For example 'a/(.*)=b/\1'."
        ),
    ] = None,
    cast: Annotated[
        _Patterns,
        typer.Option(
            "--cast", metavar="PATTERN=DTYPE", help="For example '.*=bfloat16'."
        ),
    ] = None,
    store: Annotated[
        Literal["auto", "files", "ocdbt"],
        typer.Option("--store", help="Storage of arrays (orbax only)."),
    ] = "auto",
    codec: Annotated[
        Literal["none", "compact", "zstd"],
        typer.Option("--codec", help="Compression of chunks (orbax only)."),
    ] = "none",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at DST.")
    ] = False,
    json: _app.JsonOption = False,
) -> int:
    """Converts a checkpoint to another format or array layout.

    Patterns are regular expressions on whole leaf paths. --only, --drop, --rename and
    --cast may be repeated, and apply in this order. The same command continues an
    interrupted conversion.

    Example:
      flaxckpt convert runs/7 model.safetensors --only 'params/.*'
    """
    from flaxckpt import _convert, transforms

    changes: list[Any] = [transforms.keep(_any(only))] if only else []
    changes += [transforms.drop(pattern) for pattern in drop or ()]
    changes += [transforms.rename(*_pair("rename", text)) for text in rename or ()]
    changes += [transforms.cast(*_pair("cast", text)) for text in cast or ()]
    src, step = _app.checkpoint(src, step, step_format)
    found = _convert.convert.convert(
        src,
        dst,
        format=format,
        transforms=changes,
        layout=_arrays.zarr.array_layout.ArrayLayout(store=store, codec=codec),
        step=step,
        overwrite=overwrite,
    )
    if json:
        _output.document(found)
        return _app.FINE
    size, secs = _output.size(found.bytes_written), _output.secs(found.total_secs)
    _output.line(f"wrote {_output.short(found.path)}: {size} in {secs}")
    return _app.FINE


def _any(patterns: list[str]) -> str:
    """Returns a pattern for the union of several patterns."""
    return "|".join(f"(?:{pattern})" for pattern in patterns)


def _pair(option: str, text: str) -> tuple[str, str]:
    """Splits the text at the last `=` into a pattern and a value."""
    pattern, equals, value = text.rpartition("=")
    if not equals or not pattern:
        raise errors.OptionError(
            f"--{option} must be a pattern, '=' and a value, got {text!r:.80}"
        )
    return pattern, value
