"""The `jitllm` command: every command in one table."""

import sys
from collections.abc import Sequence

from jitllm.cli.app import Command, run_program
from jitllm.cli.asm import asm
from jitllm.cli.chat import chat
from jitllm.cli.convert import convert
from jitllm.cli.hardware import hardware
from jitllm.cli.info import info
from jitllm.cli.library import library
from jitllm.cli.perplexity import perplexity
from jitllm.cli.plan import plan
from jitllm.cli.profile import profile
from jitllm.cli.run import run
from jitllm.cli.speed import speed
from jitllm.cli.sweep import sweep
from jitllm.cli.tokenize import tokenize
from jitllm.cli.verify import verify

ABOUT = "Run a language model under a memory budget; what does not fit is read from disk."

COMMANDS = (
    Command(hardware, "jitllm hardware"),
    Command(
        convert,
        "jitllm convert stories260K.gguf models/stories260K.jlm\n"
        "jitllm convert -plan big-00001-of-00003.gguf\n"
        "jitllm convert smollm2-135m",
    ),
    Command(library, "jitllm library"),
    Command(
        run,
        'jitllm run -maxmem 400K -n 16 -temp 0 models/stories260K.jlm "Once upon a time"\n'
        'jitllm run -chat smollm2-135m "Why is the sky blue?"\n'
        "cat notes.txt | jitllm run --json -maxmem=2G model.gguf -",
    ),
    Command(chat, "jitllm chat -maxmem 1G smollm2-135m"),
    Command(info, "jitllm info models/stories260K.jlm"),
    Command(tokenize, 'jitllm tokenize smollm2-135m "Once upon a time"'),
    Command(perplexity, "jitllm perplexity smollm2-135m -f notes.txt -ctx 512"),
    Command(speed, "jitllm speed smollm2-135m"),
    Command(plan, "jitllm plan -maxmem 50M smollm2-135m"),
    Command(sweep, "jitllm sweep smollm2-135m --points 8 --png curve.png"),
    Command(
        profile,
        "jitllm profile check configs/two-devices.yaml models/stories260K.jlm\n"
        "jitllm profile show configs/one-small-device.yaml -gpu-layers 3 -relocate",
    ),
    Command(verify, "jitllm verify -devices cpu:1=3M -gpu-layers 2 models/stories260K.jlm"),
    Command(asm, "jitllm asm Q4_K"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jitllm` with `argv` (by default the process's own) and return the exit code."""
    return run_program("jitllm", ABOUT, COMMANDS, sys.argv[1:] if argv is None else argv)
