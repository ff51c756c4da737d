"""The command's top: subcommands, and errors as one line.

Other distributions add subcommands through the entry-point group `kvgraft.commands`. They are found
when the command runs and imported when they are named or listed.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

import click

import kvgraft
from kvgraft.errors import KvgraftError
from kvgraft.optional import PARTS, Published, how_to_install, published
from kvgraft.refusals import of_type, other_names
from kvgraft_cli.components import components
from kvgraft_cli.doctor import COMMANDS, doctor
from kvgraft_cli.interrupts import UninterruptedImport

__all__ = ["main"]

SET_BY = {"device_bytes": "--device-tokens", "host_bytes": "--host-tokens"}
"""Options whose names differ from their settings."""

REPLAY = (*PARTS["density"], *PARTS["guard"], *PARTS["sizes"], "plugins/replay")

ADDED_BY = {
    "check": PARTS["simulated"],
    "check-tier": PARTS["simulated"],
    "new-component": PARTS["simulated"],
    "new-policy": PARTS["simulated"],
    "plan": REPLAY,
    "replay": REPLAY,
    "serve": ("plugins/transformers/requirements.txt",),
    "storage": PARTS["storage"],
}
"""Commands of packages that are installed separately, and the packages."""


class Commands(click.Group):
    """The core's subcommands and those of installed distributions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, sorted."""
        added = [each.name for each in published(COMMANDS)]
        return sorted({*super().list_commands(ctx), *added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The core's commands first; a broken one of another package says so when it runs."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for each in published(COMMANDS):
            if each.name != cmd_name:
                continue
            if each.contested is not None:
                return _unavailable(each, each.contested)
            try:
                found = each.load()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by another package
                return _unavailable(each, f"{type(error).__name__}: {error}")
            if isinstance(found, click.Command):
                return found
            return _unavailable(each, f"{of_type(found)} is no command")
        if cmd_name in ADDED_BY:
            advice = how_to_install(*ADDED_BY[cmd_name])
            ctx.fail(f"command {cmd_name!r} is not installed; {advice}")
        if not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            longer = [each for each in names if each.startswith(f"{cmd_name}-")]
            near = longer or get_close_matches(cmd_name, names, n=1)
            meant = " or ".join(map(repr, near))
            advice = f"did you mean {meant}?" if near else f"it has {', '.join(names)}"
            ctx.fail(f"no such command {cmd_name!r}; {advice}")
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click, which would take the last value of a repeated option and drop the others."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            _refuse_repeated(command, ctx, name, rest)
        return name, command, rest


def _refuse_repeated(
    command: click.Command, parent: click.Context, name: str | None, arguments: list[str]
) -> None:
    """Refuse a single-valued option that is given twice, to a command or a subcommand."""
    with click.Context(command, parent, name, **command.context_settings) as ctx:
        _, rest, order = command.make_parser(ctx).parse_args(list(arguments))
        _expect_once(ctx, order)
        if isinstance(command, click.Group) and rest:
            own = command.get_command(ctx, rest[0])
            if own is not None:
                _refuse_repeated(own, ctx, rest[0], rest[1:])


def _expect_once(ctx: click.Context, order: list[click.Parameter]) -> None:
    for option, n_times in Counter(order).items():
        if not isinstance(option, click.Option) or option.is_eager or n_times == 1:
            continue
        if not (option.multiple or option.count):
            listed = (option.metavar or option.type.name).endswith(",...")
            advice = "give it once" + ", with commas between its values" * listed
            ctx.fail(f"{option.opts[0]} is given {n_times} times; {advice}")


def _unavailable(command: Published, reason: str) -> click.Command:
    """A command that says why it is not available."""
    name, owner = command.name, command.distribution or "an unknown distribution"

    def refuse() -> None:
        raise click.ClickException(f"command {name!r} of {owner}: {' '.join(reason.split())}")

    return click.Command(
        name,
        callback=refuse,
        short_help=f"(unavailable: see kvgraft {name})",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvgraft.__version__, prog_name="kvgraft")
def cli() -> None:
    """One prefix tree, any attention: a hierarchical KV cache for hybrid language models."""


cli.add_command(components)
cli.add_command(doctor)


def _as_typed(message: str, arguments: Sequence[str]) -> str:
    """The message with the names of options instead of settings."""
    typed = {each.partition("=")[0] for each in arguments}

    def name(found: re.Match[str]) -> str:
        setting = found[1]
        option = SET_BY.get(setting, "--" + setting.replace("_", "-"))
        return option if option in typed else found[0]

    return re.sub(r"\bsetting (\w+)(?!\.)\b", name, message)


def _said(error: click.ClickException) -> str:
    """Its message; for an unknown option it suggests ours of that meaning or a similar name."""
    if isinstance(error, click.NoSuchOption) and error.ctx is not None:
        options = {option for each in error.ctx.command.params for option in each.opts}
        known = [each.lstrip("-").replace("-", "_") for each in options]
        name = error.option_name.lstrip("-").replace("-", "_")
        near = other_names(name, known, lambda each: "--" + each.replace("_", "-"))
        near = near or list(error.possibilities or ())[:1]  # most similar first
        if near:
            return f"no such option {error.option_name}; did you mean {' or '.join(near)}?"
    return error.format_message().replace("a valid integer range", "a whole number")


def main() -> None:
    """Run the command; bad input is one line on stderr and exit status 2."""
    UninterruptedImport.install("torch")
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        click.echo("kvgraft: stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        message = _said(error)
        if message.startswith("Usage:"):  # the help, if a subcommand is missing
            error.show()
        else:
            line = " ".join(message.split())
            click.echo(f"kvgraft: {line[:1].lower()}{line[1:]}", err=True)
        sys.exit(error.exit_code)
    except KvgraftError as error:
        click.echo(f"kvgraft: {_as_typed(str(error), sys.argv[1:])}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
