"""`flaxckpt convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from flaxckpt import _zarr, errors
from flaxckpt.cli import _app, _output, _transforms
from flaxckpt.cli._parameters import Argument, Option

if TYPE_CHECKING:
    from flaxckpt.transforms import Transform

_Format = Annotated[
    Literal["orbax", "safetensors", "msgpack", "huggingface"] | None,
    Option(
        "--format", "-f", "--to", help="By default from the suffix of DST, else orbax."
    ),
]
_Store = Annotated[
    Literal["auto", "files", "ocdbt"] | None,
    Option("--store", help="No effect: all arrays are stored in a database."),
]
_Codec = Annotated[
    Literal["none", "compact", "zstd"],
    Option("--codec", help="Compression of chunks (orbax only)."),
]
_Items = Annotated[
    str | None,
    Option(
        "--items",
        metavar="NAME,…",
        help="One item, or the branches of the state that are items, joined by"
        " commas (orbax only). By default those of SRC.",
    ),
]
_Target = Annotated[
    str | None,
    Option("--target", metavar="LAYOUT", help="Layout of the map, such as linen."),
]
_Prefix = Annotated[
    str | None,
    Option("--prefix", metavar="PATH", help="Leaf path of the mapped parameters."),
]
_Config = Annotated[
    str | None,
    Option(
        "--config",
        metavar="PATH",
        help="config.json, or its directory (huggingface only).",
    ),
]
_Tokenizer = Annotated[
    str | None,
    Option(
        "--tokenizer",
        metavar="DIR",
        help="Directory of files to copy (huggingface only).",
    ),
]


@_app.verb
def convert(
    src: Annotated[
        str, Argument(metavar="SRC", help="A checkpoint, or a run directory.")
    ],
    dst: Annotated[str, Argument(metavar="DST", help="Path of the new checkpoint.")],
    format: _Format = None,
    step: _app.StepOption = None,
    step_format: _app.StepFormatOption = None,
    only: _transforms.OnlyOption = None,
    drop: _transforms.DropOption = None,
    rename: _transforms.RenameOption = None,
    cast: _transforms.CastOption = None,
    lossy: _transforms.LossyOption = False,
    store: _Store = None,
    codec: _Codec = "none",
    items: _Items = None,
    map: _transforms.MapOption = None,
    target: _Target = None,
    prefix: _Prefix = None,
    config: _Config = None,
    tokenizer: _Tokenizer = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace a checkpoint at DST.")
    ] = False,
    json: _app.JsonOption = False,
) -> int:
    """Converts a checkpoint to another format or array layout.

    Patterns are regular expressions on whole leaf paths. --only, --drop, --rename and
    --cast may be repeated, and apply in this order. The same command continues an
    interrupted conversion.

    --map converts a published model to the layout of a Flax program before all other
    changes; --to huggingface converts it back after them.

    Example:
      flaxckpt convert runs/7 model.safetensors --only 'params/.*'
      flaxckpt convert Llama-3.2-1B flax --map auto --target linen --prefix params
      flaxckpt convert runs/7 tuned --to huggingface --config Llama-3.2-1B
    """
    from flaxckpt import _convert

    changes = _transforms.parse(only, drop, rename, cast, lossy=lossy)
    src, step = _app.locate_step(src, step, step_format)
    if format == "huggingface":
        _refuse({"--items": items}, "without --to huggingface")
        result = _convert.exports.export_huggingface(
            src,
            dst,
            map=map or "auto",
            target=target,
            prefix=prefix,
            step=step,
            transforms=changes,
            config=config,
            tokenizer=tokenizer,
            overwrite=overwrite,
        )
    else:
        _refuse({"--config": config, "--tokenizer": tokenizer}, "with --to huggingface")
        result = _convert.convert.convert(
            src,
            dst,
            format=format,
            transforms=[*_map_changes(src, map, target, prefix), *changes],
            layout=_zarr.array_layout.ArrayLayout(store=store, codec=codec),
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


def _map_changes(
    src: str, name: str | None, target: str | None, prefix: str | None
) -> list[Transform]:
    """Returns the map of a published model; empty without --map."""
    if name is None:
        _refuse({"--target": target, "--prefix": prefix}, "with --map")
        return []
    from flaxckpt._maps import named

    return named.find_for_layout(name, src, target, prefix or "")


def _refuse(options: Mapping[str, str | None], need: str) -> None:
    """Raises OptionError for options that are set, but have no effect."""
    for option, value in options.items():
        if value is not None:
            raise errors.OptionError(f"{option} has an effect only {need}")


def _parse_items(text: str | None) -> str | tuple[str, ...] | None:
    """Returns the name of an item, or several names if `text` has a comma."""
    if text is None or "," not in text:
        return text
    return tuple([name for name in text.split(",") if name])
