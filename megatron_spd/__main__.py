"""The command line: `megatron-spd SUBCOMMAND [CONFIG.toml] [--section.key=value ...]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from jsonargparse import ArgumentParser
from rich.console import Console

from megatron_spd import __version__
from megatron_spd.cli.plan import make_report
from megatron_spd.config import add_sections, parse_options, read_toml
from megatron_spd.errors import ConfigError, SpdError
from megatron_spd.launcher import record_failure


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


def run_train(arguments: Sequence[str]) -> None:
    """Trains the speculation module of a target over the ranks of a plan."""
    from megatron_spd.cli.train import train

    parser = ArgumentParser(
        prog="megatron-spd train", exit_on_error=False, description=run_train.__doc__
    )
    options = _parse(parser, ("plan", "module", "train"), arguments)
    summary = train(options.plan, options.module, options.train, ["train", *arguments])
    if summary is not None:
        print(summary)


def run_quickstart(arguments: Sequence[str]) -> None:
    """Trains a small target and its module on this machine, decodes and reports."""
    from megatron_spd.quickstart.job import quickstart

    parser = ArgumentParser(
        prog="megatron-spd quickstart", exit_on_error=False, description=run_quickstart.__doc__
    )
    options = _parse(parser, ("quickstart",), arguments)
    console = Console()
    try:
        report = quickstart(options.quickstart, console)
    except KeyboardInterrupt:
        print("megatron-spd: ended; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    console.print(report.to_table())
    report.check()


def run_regenerate(arguments: Sequence[str]) -> None:
    """Lets the target write texts to train a module on."""
    from megatron_spd.cli.regenerate import regenerate

    parser = ArgumentParser(
        prog="megatron-spd regenerate", exit_on_error=False, description=run_regenerate.__doc__
    )
    options = _parse(parser, ("plan", "regenerate"), arguments)
    print(regenerate(options.plan, options.regenerate))


def run_eval(arguments: Sequence[str]) -> None:
    """Decodes prompts, and holds acceptance against what training says of the same texts."""
    from megatron_spd.cli.evaluate import evaluate

    parser = ArgumentParser(
        prog="megatron-spd eval", exit_on_error=False, description=run_eval.__doc__
    )
    parser.add_argument("--json", type=str, default="", help="File for the report.")
    parser.add_argument("--tolerance", type=float, help="Short for --eval.tolerance.")
    options = _parse(parser, ("plan", "eval"), arguments)
    if options.tolerance is not None:
        options.eval = replace(options.eval, tolerance=options.tolerance)
    report = evaluate(options.plan, options.eval, ["eval", *arguments], options.json)
    if report is not None:
        Console().print(report.to_table())
        report.check()


def run_bench(arguments: Sequence[str]) -> None:
    """Measures the engine: `bench cycle`, over stages that sleep."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: megatron-spd bench {{{','.join(BENCHES)}}} [--help]")
        raise SystemExit(0 if arguments else 2)
    bench = BENCHES.get(arguments[0])
    if bench is None:
        raise ConfigError(f"unknown benchmark {arguments[0]!r}; there is {', '.join(BENCHES)}")
    bench(arguments[1:])


def run_bench_cycle(arguments: Sequence[str]) -> None:
    """Measures what a cycle costs beside the stages' own time, which they sleep out."""
    from megatron_spd.cli.bench_cycle import bench_cycle

    parser = ArgumentParser(
        prog="megatron-spd bench cycle", exit_on_error=False, description=run_bench_cycle.__doc__
    )
    parser.add_argument("--json", type=str, default="", help="File for the report.")
    options = _parse(parser, ("bench",), arguments)
    report = bench_cycle(options.bench, ["bench", "cycle", *arguments], options.json)
    if report is not None:
        Console().print(report.to_table())


BENCHES: dict[str, Callable[[Sequence[str]], None]] = {"cycle": run_bench_cycle}
"""What `bench` can measure."""

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "quickstart": run_quickstart,
    "plan": run_plan,
    "train": run_train,
    "generate": run_generate,
    "eval": run_eval,
    "regenerate": run_regenerate,
    "bench": run_bench,
}
"""Each subcommand and what runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code: 0, or the error's (2 for the user's).

    A rank that has a launcher leaves its failure to that: n ranks would say the same n times.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SpdError as error:
        if not record_failure(error):
            print(f"megatron-spd: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("megatron-spd: ended by SIGINT", file=sys.stderr)
        return 130
    except Exception as error:
        if not record_failure(error):
            raise
        return 1


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
    lines += [f"  {name:<11}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "megatron-spd SUBCOMMAND --help lists its options."])


def _leave(code: int) -> NoReturn:
    """Ends the process; a rank that failed without the teardown, which may wait for its peers."""
    if code == 0 or "RANK" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
