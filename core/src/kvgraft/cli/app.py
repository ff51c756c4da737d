"""The command's top: subcommands, and errors as one line."""

from __future__ import annotations

import sys

import click

import kvgraft
from kvgraft.cli.check import check
from kvgraft.cli.components import components
from kvgraft.cli.new_component import new_component
from kvgraft.cli.replay import replay
from kvgraft.errors import KvgraftError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvgraft.__version__, prog_name="kvgraft")
def cli() -> None:
    """One prefix tree, any attention: a hierarchical KV cache for hybrid language models."""


cli.add_command(check)
cli.add_command(components)
cli.add_command(new_component)
cli.add_command(replay)


def main() -> None:
    """Run the command; bad input is one line on stderr and exit status 2."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        click.echo("kvgraft: stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        message = error.format_message()
        if "\n" in message:  # the help, where a subcommand is missing
            error.show()
        else:
            click.echo(f"kvgraft: {message[:1].lower()}{message[1:]}", err=True)
        sys.exit(error.exit_code)
    except KvgraftError as error:
        click.echo(f"kvgraft: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
