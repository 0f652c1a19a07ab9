"""Builds the recipe with rattler-build and runs its tests, without conda-forge.

The script makes a channel with the packages that the recipe names, at the lowest
versions that it allows. Only `python` has files: a virtual environment with the Python
and the installed packages of this script. So pip, hatchling and the dependencies of
flaxckpt must be installed beside rattler-build, and the build does not show that
conda-forge has these packages.

    python conda-recipe/build.py dist/flaxckpt-0.2.0-py3-none-any.whl
"""

import io
import json
import os
import platform
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import rattler_build

RECIPE = Path(__file__).with_name("recipe.yaml")
INTERPRETER = Path(sys.executable).resolve()
MINOR = f"python{sysconfig.get_python_version()}"
INSTALLED = sysconfig.get_path("purelib")
ENVIRONMENT: dict[str, Path | bytes] = {
    "bin/python": INTERPRETER,
    f"bin/{MINOR}": INTERPRETER,
    "pyvenv.cfg": f"home = {INTERPRETER.parent}\n".encode(),
    f"lib/{MINOR}/site-packages/installed.pth": f"{INSTALLED}\n".encode(),
}
"""The files of the package `python`; for a link, the path of its target."""


def add_package(folder: Path, spec: str) -> tuple[str, dict[str, object]]:
    """Writes a package at the lowest version that `spec` allows.

    Returns:
        The name of its file and its record in the index of the channel.
    """
    name, _, version = spec.partition(" >=")
    files: dict[str, Path | bytes] = {}
    if name == "python":
        version, files = platform.python_version(), ENVIRONMENT
    record: dict[str, object] = {"name": name, "version": version or "0"}
    record |= {"build": "0", "build_number": 0, "depends": [], "subdir": folder.name}
    paths = [
        {"_path": path, "path_type": ("hardlink", "softlink")[isinstance(file, Path)]}
        for path, file in files.items()
    ]
    info: dict[str, Path | bytes] = {
        "info/index.json": json.dumps(record).encode(),
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
    }
    archive = folder / f"{name}-{record['version']}-0.tar.bz2"
    with tarfile.open(archive, "w:bz2") as tar:
        for path, file in {**info, **files}.items():
            member = tarfile.TarInfo(path)
            if isinstance(file, Path):
                member.type, member.linkname = tarfile.SYMTYPE, str(file)
                tar.addfile(member)
            else:
                member.size = len(file)
                tar.addfile(member, io.BytesIO(file))
    return archive.name, record


def build(scratch: Path) -> tuple[rattler_build.Package, str]:
    """Builds the package of the recipe in the folder `scratch`.

    Returns:
        The package and the URL of the channel.
    """
    recipe = rattler_build.Stage0Recipe.from_file(RECIPE)
    [variant] = recipe.render(rattler_build.VariantConfig())
    wanted = variant.recipe.requirements.to_dict()
    folder = scratch / "channel" / "noarch"
    folder.mkdir(parents=True)
    specs = dict.fromkeys(wanted["host"] + wanted["run"])
    index = {"packages": dict(add_package(folder, spec) for spec in specs)}
    (folder / "repodata.json").write_text(json.dumps(index))
    channel = folder.parent.as_uri()
    log: list[str] = []
    try:
        built = variant.run_build(
            output_dir=scratch / "built",
            channels=[channel],
            progress_callback=SimpleNamespace(
                on_log=lambda event: log.append(event.message)
            ),
        )
    except rattler_build.RattlerBuildError as error:
        sys.exit("\n".join([*log, str(error)]))
    return rattler_build.Package.from_file(built.packages[0]), channel


def check(package: rattler_build.Package, channel: str, wheel: Path) -> None:
    """Compares the package with the wheel and runs the tests of the recipe."""
    metadata = f"{package.name}-{package.version}.dist-info/METADATA"
    wanted = {metadata, *zipfile.ZipFile(wheel).namelist()}
    found = {path.removeprefix("site-packages/") for path in package.files}
    added_by_pip = {path for path in found - wanted if ".dist-info/" in path}
    if differing := sorted((found - added_by_pip) ^ wanted):
        sys.exit(f"{package.filename} and {wheel.name} differ in {differing}")
    for test in package.run_tests(channel=[channel]):
        if not test.success:
            sys.exit("\n".join(test.output))
    print(f"{package.filename}: has the files of {wheel.name} and passes its tests")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ["RATTLER_CACHE_DIR"] = str(Path(name) / "cache")
        check(*build(Path(name)), Path(sys.argv[1]))
