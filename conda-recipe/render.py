"""Renders the recipe as rattler-build does, but without a channel.

A build needs a channel, for Python and hatchling in its environment. This checks what
does not: the schema, the expressions, the version specs and the name of the package.
"""

from pathlib import Path

import rattler_build

RECIPE = Path(__file__).with_name("recipe.yaml")


def main() -> None:
    """Prints the package that each variant of the recipe would make.

    Raises:
        RattlerBuildError: The recipe is not valid.
    """
    recipe = rattler_build.Stage0Recipe.from_file(RECIPE)
    for variant in recipe.render(rattler_build.VariantConfig()):
        package, build = variant.recipe.package, variant.recipe.build.to_dict()
        name = f"{package.name}-{package.version}-{build['string']}"
        print(f"{name}.conda: {build['noarch']}, from {RECIPE.name}")


if __name__ == "__main__":
    main()
