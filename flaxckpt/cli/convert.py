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
        _Patterns, typer.Option("--only", metavar="PATTERN", help="Leaves to keep.")
    ] = None,
    drop: Annotated[
        _Patterns, typer.Option("--drop", metavar="PATTERN", help="Leaves to drop.")
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
    items: Annotated[
        str | None,
        typer.Option(
            "--items",
            metavar="NAME,…",
            help="One item, or the branches of the state that are items, joined by"
            " commas (orbax only). By default those of SRC.",
            show_default=False,
        ),
    ] = None,
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

    changes: list[Any] = (
        [transforms.keep("|".join(f"(?:{pattern})" for pattern in only))]
        if only
        else []
    )
    changes += [transforms.drop(pattern) for pattern in drop or ()]
    changes += [transforms.rename(*_split("rename", text)) for text in rename or ()]
    changes += [transforms.cast(*_split("cast", text)) for text in cast or ()]
    src, step = _app.locate_step(src, step, step_format)
    result = _convert.convert.convert(
        src,
        dst,
        format=format,
        transforms=changes,
        layout=_arrays.zarr.array_layout.ArrayLayout(store=store, codec=codec),
        items=_parse_items(items),
        step=step,
        overwrite=overwrite,
    )
    if json:
        _output.print_document(result)
        return _app.SUCCESS
    size, secs = _output.size(result.bytes_written), _output.secs(result.total_secs)
    _output.print_line(f"wrote {_output.shorten_path(result.path)}: {size} in {secs}")
    return _app.SUCCESS


def _parse_items(text: str | None) -> str | tuple[str, ...] | None:
    """Returns the name of an item, or several names if `text` has a comma."""
    if text is None or "," not in text:
        return text
    return tuple([name for name in text.split(",") if name])


def _split(option: str, text: str) -> tuple[str, str]:
    """Splits the text at the last `=` into a pattern and a value."""
    pattern, equals, value = text.rpartition("=")
    if not equals or not pattern:
        raise errors.OptionError(
            f"--{option} must be PATTERN=VALUE, found {text!r:.80}"
        )
    return pattern, value
