"""The command line, called in this process."""

import json

from click.testing import CliRunner

from flaxckpt.cli import app


def run(*arguments, code=0):
    """Returns what a call prints; asserts its exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def read_json(*arguments, code=0):
    """Returns what a call prints with `--json`."""
    return json.loads(run(*arguments, "--json", code=code))
