"""The command line: `megatron-spd SUBCOMMAND [CONFIG.toml] [--section.key=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentParser
from rich.console import Console

from megatron_spd import __version__
from megatron_spd.cli.plan import make_report
from megatron_spd.config import add_sections, parse_options, read_toml
from megatron_spd.errors import ConfigError, SpdError


def run_plan(arguments: Sequence[str]) -> None:
    """Shows what each rank of a plan would hold."""
    parser = ArgumentParser(
        prog="megatron-spd plan", exit_on_error=False, description=run_plan.__doc__
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    options = _parse(parser, ("plan",), arguments)
    report = make_report(options.plan)
    if options.json:
        print(report.to_json())
    else:
        Console().print(report.to_table())


def run_generate(arguments: Sequence[str]) -> None:
    """Continues a prompt over the ranks of a plan."""
    from megatron_spd.cli.generate import generate, to_json  # torch loads only when it is needed

    parser = ArgumentParser(
        prog="megatron-spd generate", exit_on_error=False, description=run_generate.__doc__
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of the text.")
    options = _parse(parser, ("plan", "generate"), arguments)
    result = generate(options.plan, options.generate, ["generate", *arguments])
    if result is not None:
        print(to_json(result) if options.json else options.generate.prompt + result.text)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "plan": run_plan,
    "generate": run_generate,
}
"""Each subcommand and what runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code: 0, or the error's (2 for the user's)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SpdError as error:
        print(f"megatron-spd: {error}", file=sys.stderr)
        return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(__version__)
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    command = COMMANDS.get(arguments[0])
    if command is None:
        raise ConfigError(f"unknown subcommand {arguments[0]!r}; there is {', '.join(COMMANDS)}")
    command(arguments[1:])
    return 0


def _parse(parser: ArgumentParser, sections: Sequence[str], arguments: Sequence[str]) -> Any:
    """Reads the optional leading CONFIG.toml, then the dotted options over it."""
    add_sections(parser, sections)
    rest = list(arguments)
    from_file = read_toml(rest.pop(0), sections) if rest and not rest[0].startswith("-") else []
    return parse_options(parser, [*from_file, *rest], sections)


def _usage() -> str:
    lines = ["usage: megatron-spd SUBCOMMAND [CONFIG.toml] [--section.key=value ...]", ""]
    lines += [f"  {name:<10}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "megatron-spd SUBCOMMAND --help lists its options."])


if __name__ == "__main__":
    sys.exit(main())
