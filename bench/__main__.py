"""python -m draft_verify.bench COMMAND: one command for each question a model author asks."""

from __future__ import annotations

import importlib
import sys

# command -> (module, the question it answers)
COMMANDS = {
    "window": ("window", "Should I turn speculation on, and with what window? From acceptance rates and step times."),
    "workload": ("workload", "On which of my prompts does it pay? Runs a small real model over them, chain and tree."),
    "demo": ("demo", "Does speculative decoding with these kernels emit what plain decoding emits?"),
    "cost": ("cost", "What does each kernel cost on trn2, what bounds it, how far from the HBM limit? Modelled."),
    "micro": ("micro", "The same grid as a benchmark: modelled and, on a device, measured; --compare for regressions."),
    "report": ("report", "All of it on one page with pictures, to open offline."),
    "device": ("device", "On a Neuron device: is every kernel right, and how long does it take beside the model?"),
    "emulator": ("emulator", "How long does the emulator itself take to trace and to run a kernel?"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: python -m draft_verify.bench COMMAND [-h] [...]", ""]
    lines += [f"  {name:{width}}  {question}" for name, (_, question) in COMMANDS.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] not in COMMANDS:
        print(f"no such command: {argv[0]}\n\n{usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    try:
        return importlib.import_module(f".{module}", __package__).main(argv[1:])
    except OSError as error:  # a file that is not there, or cannot be written
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
