"""From the shell to the first token: `jitllm run` on a container, with cold and with warm caches.

    python -m benchmarks.first_token MODEL [--rounds 5] [--maxmem SIZE]

Cold: no compiled steps and no kernels' object code in the cache, as on the first run ever (the
container itself is there, and in the page cache or not as the system has it). Warm: the same
command again. Timed is the whole process up to the first byte of the reply, imports included.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "Once upon a time"
_RUN = "import sys; from jitllm.cli.jitllm import main; sys.exit(main(sys.argv[1:]))"


def seconds_to_first_token(container: Path, cache: Path, flags: list[str]) -> float:
    """Seconds from starting the process to the first byte behind the prompt on its stdout."""
    command = [sys.executable, "-c", _RUN, "run", "-n", "2", "-temp", "0", *flags]
    start = time.perf_counter()
    with subprocess.Popen(
        [*command, str(container), PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"JITLLM_CACHE": str(cache)},
    ) as process:
        shown = process.stdout.read(len(PROMPT) + 1)
        seconds = time.perf_counter() - start
        errors = process.communicate()[1].decode()
    if process.returncode or len(shown) <= len(PROMPT):
        sys.exit(f"jitllm run failed: {errors}")
    return seconds


def main() -> None:
    """Print a table of cold and warm starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a container, a GGUF or a catalog name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--maxmem")
    args = parser.parse_args()
    from jitllm.catalog import resolve

    container = resolve(args.model, say=lambda line: print(line, file=sys.stderr))
    flags = ["-maxmem", args.maxmem] if args.maxmem else []
    cold, warm = [], []
    for _ in range(args.rounds):
        cache = Path(tempfile.mkdtemp(prefix="jitllm-first-token-"))
        cold.append(seconds_to_first_token(container, cache, flags))
        warm.append(seconds_to_first_token(container, cache, flags))
        shutil.rmtree(cache)
    print(f"{container.name}: seconds from the shell to the first token, {args.rounds} rounds\n")
    print("| caches | median | fastest | slowest |\n|---|---|---|---|")
    for name, times in (("cold", cold), ("warm", warm)):
        print(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")


if __name__ == "__main__":
    main()
