"""The ``neoserve`` command. Heavy imports stay inside the commands, so that --help answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from neoserve.cli import bench, chat, doctor, generate, inspect, pull, serve
from neoserve.types.errors import ConfigurationError, NeoServeError

# Typer carries its own copy of click from 0.16 on and uses the package before; both have these base classes.
_BASES: dict[str, type[Exception]] = {kind.__name__: kind for kind in typer.BadParameter.__mro__}
_USAGE_ERROR = _BASES["UsageError"]
_CLICK_ERROR = _BASES["ClickException"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


app = typer.Typer(
    name="neoserve",
    help="Serves large language models on CPUs, with an OpenAI-compatible API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from neoserve import __version__

        typer.echo(f"neoserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serves large language models on CPUs, with an OpenAI-compatible API."""


app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("pull")(pull.pull)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's) and returns the exit code.

    0: done; 1: a NeoServeError, told in one line; 2: a wrong command line; 130: interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        result = command.main(words, prog_name="neoserve", standalone_mode=False)
    except ConfigurationError as error:
        # "-ngl" parses as "-n gl" where there is a -n: what looks like a bad value may be a flag of another server.
        return _tell_foreign(command, words) or _tell(str(error), EXIT_FAILED)
    except NeoServeError as error:
        return _tell(str(error), EXIT_FAILED)
    except _USAGE_ERROR as error:
        return _tell_foreign(command, words) or _tell_usage(error)
    except _CLICK_ERROR as error:
        return _tell(_message(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (| head); Python's own flush at exit must not complain either.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _tell_foreign(command: Any, words: Sequence[str]) -> int:
    """Answers a flag of another server with ours and returns the exit code; 0 if there is none among ``words``."""
    from neoserve.cli import foreign_flags

    flags = foreign_flags.flags_of(getattr(command, "commands", {}))
    known = foreign_flags.answer(words, words[0] if words else "", flags)
    return 0 if known is None else _tell(known, EXIT_USAGE)


def _tell_usage(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(_message(error))
        return EXIT_USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "neoserve"
    return _tell(f"{_message(error)} (see {path} --help)", EXIT_USAGE)


def _message(error: Exception) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return str(text)


def _tell(text: str, code: int) -> int:
    typer.echo(f"neoserve: {' '.join(text.split())}", err=True)
    return code
