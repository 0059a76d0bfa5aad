"""python -m draft_verify.reference.emulator lint FILE... | trace FILE:KERNEL ARGUMENT..."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys

import numpy as np

from . import dtypes, install, jit, trace
from .lint import lint_file


def lint_command(arguments: argparse.Namespace) -> int:
    """Prints what the lint refuses; 1 if it refused anything."""
    findings = [finding for path in arguments.files for finding in lint_file(path)]
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def trace_command(arguments: argparse.Namespace) -> int:
    """Prints the program of a kernel, or its cost and schedule."""
    install()
    path, _, name = arguments.kernel.rpartition(":")
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = jit(getattr(module, name))
    program = trace(kernel[2] if arguments.lnc == 2 else kernel, *map(argument, arguments.arguments))
    if arguments.cost:
        print(program.cost())
        print(program.schedule())
    else:
        print(program)
    if arguments.schedule:
        program.schedule().save(arguments.schedule)
    return 0


def argument(text: str):
    """`bfloat16[1,8,128]` as an array to trace with, anything else as a Python literal or, failing that, a string."""
    match = re.fullmatch(r"(\w+)\[([\d,]+)\]", text)
    if match:
        dtype = dtypes.resolve(match[1])
        if dtype is None:
            raise SystemExit(f"{text}: no such dtype; nl has {', '.join(dtypes.ALL)}")
        return np.zeros(tuple(map(int, match[2].split(","))), dtype.np)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m draft_verify.reference.emulator", description=__doc__)
    commands = parser.add_subparsers(required=True)
    lint = commands.add_parser("lint", help="refuse kernel source that compiles nowhere or means something else")
    lint.add_argument("files", nargs="+", metavar="FILE")
    lint.set_defaults(command=lint_command)
    tracing = commands.add_parser("trace", help="show the program of a kernel, its cost, its schedule")
    tracing.add_argument("kernel", metavar="FILE:KERNEL")
    tracing.add_argument("arguments", nargs="*", metavar="ARGUMENT", help='such as "bfloat16[1,8,128]", 3 or None')
    tracing.add_argument("--lnc", type=int, choices=(1, 2), default=1)
    tracing.add_argument("--cost", action="store_true", help="cost and schedule instead of the listing")
    tracing.add_argument("--schedule", metavar="JSON", help="write the schedule there, for ui.perfetto.dev")
    tracing.set_defaults(command=trace_command)
    arguments = parser.parse_args(argv)
    return arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
