"""The command line: it parses, calls and prints, and does nothing else.

Each command is registered by the module that implements it, which is imported
only when the command runs: `ebbtide --version` must not wait for torch.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
import typer.core

from ebbtide.commands.output import printable
from ebbtide.errors import EbbtideError, ExitCode, MissingExtraError
from ebbtide.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """A command whose module is imported when it is called."""

    name: str
    """The word after `ebbtide`."""

    module: str
    """The module with `register(app: typer.Typer) -> None`, which adds `name` to `app`."""

    extras: str
    """The extras it needs, with commas between them."""

    summary: str
    """One line for `ebbtide --help`, which imports nothing."""


COMMANDS = (
    LazyCommand(
        name="compare",
        module="ebbtide.compare.command",
        extras="torch,demo",
        summary="Train one model under every strategy; print time, memory and loss side by side.",
    ),
    LazyCommand(
        name="estimate",
        module="ebbtide.commands.estimate",
        extras="",
        summary="Estimate what a model takes on a machine: time, memory, and what to move.",
    ),
    LazyCommand(
        name="doctor",
        module="ebbtide.commands.doctor",
        extras="torch,jax",
        summary="Say what this machine can do, and what of it makes offloading slow.",
    ),
    LazyCommand(
        name="observe",
        module="ebbtide.commands.observe",
        extras="torch,demo",
        summary="Measure one training step of a model; write what it stores and how long it takes.",
    ),
    LazyCommand(
        name="plan",
        module="ebbtide.commands.plan",
        extras="solver,report",
        summary="Plan a measured step for a memory budget, or check a plan.",
    ),
    LazyCommand(
        name="trace",
        module="ebbtide.commands.trace",
        extras="report",
        summary="Read a profiler's file: how much of the copies is hidden, and what to change.",
    ),
    LazyCommand(
        name="verify",
        module="ebbtide.commands.verify",
        extras="torch,demo",
        summary="Compare steps with and without a plan on a real model, bit for bit.",
    ),
)


def build_app(commands: tuple[LazyCommand, ...] = COMMANDS) -> typer.Typer:
    """Build the application; no command's module is imported yet."""
    app = typer.Typer(
        name="ebbtide",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_top_level)
    for command in commands:
        _add_lazily(app, command)
    return app


def main() -> None:
    """Run the command line; the exit status is one of `ExitCode`."""
    try:
        build_app()()
    except EbbtideError as error:
        print(f"ebbtide: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        raise SystemExit(ExitCode.FAILED) from error


def _print_version(is_wanted: bool) -> bool:
    if is_wanted:
        print(f"ebbtide {__version__}")
        raise typer.Exit(ExitCode.DONE)
    return is_wanted


def _top_level(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Fit training in memory: evict, fetch or recompute activations."""


def _no_options() -> None:
    """Fit training in memory: evict, fetch or recompute activations."""


class PassOn(typer.core.TyperCommand):
    """A command whose arguments are all another one's: options too, and two dashes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take everything as it is."""
        return super().parse_args(ctx, ["--", *args])


def _add_lazily(app: typer.Typer, command: LazyCommand) -> None:
    """Add a stand-in that passes its arguments, `--help` too, to the real command."""

    def stand_in(
        arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    ) -> None:
        _run(command, arguments or [])

    app.command(command.name, cls=PassOn, help=command.summary, add_help_option=False)(stand_in)


def _run(command: LazyCommand, arguments: list[str]) -> None:
    """Import the command's module and run it; ends in `SystemExit`, as typer does."""
    real_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # With a callback an app of one command still expects that command's name, so usage
    # messages read "ebbtide compare" however many commands the module registers.
    real_app.callback()(_no_options)
    try:
        module = importlib.import_module(command.module)
        register = cast(Callable[[typer.Typer], None], module.register)
        register(real_app)
        real_app(args=[command.name, *arguments], prog_name="ebbtide")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "ebbtide":
            raise
        raise MissingExtraError.for_extra(
            command.extras, needed_by=f"ebbtide {command.name} ({error.name})"
        ) from error
