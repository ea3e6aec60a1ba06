"""What placement costs where it is not used: python -m benchmarks.placement MODEL [--rounds 9]

The same model twice in one process: opened for the host alone, and opened with another device and a
rule that leaves every block on the host. Both decode the same tokens in turn; the ratio of their
rates is 1.0 but for noise. Beside them a third, with every block on the other device, which on a
CPU that stands in for an accelerator (`cpu:1`) has the same cores and the same memory.
"""

import argparse
import statistics
import time

from jitllm import Engine
from jitllm.placement.rules import Profile, parse_placement
from jitllm.session import Session

N_TOKENS = 64


def rate(session: Session) -> float:
    """Tokens a second of decoding from an empty context."""
    session.reset()
    start = time.perf_counter()
    for token in range(5, 5 + N_TOKENS):
        session.prefill([token])
    return N_TOKENS / (time.perf_counter() - start)


def main() -> None:
    """Print rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a container, a GGUF or a catalog name")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    placements = {
        # The devices first: further CPU devices can only be made before JAX runs.
        "a rule, all on the host": ("cpu:1", "*=host"),
        "all on cpu:1": ("cpu:1", "*=cpu:1,head=cpu:1"),
        "host alone": ("cpu", None),
    }
    rates: dict[str, list[float]] = {name: [] for name in placements}
    sessions = {}
    for name, (devices, rules) in placements.items():
        profile = Profile(rules=parse_placement(rules) if rules else ())
        engine = Engine.open(args.model, devices=devices, profile=profile, max_seq=512)
        sessions[name] = engine.session()
    for number in range(args.rounds + 1):
        for name, session in sessions.items():
            measured = rate(session)
            if number:  # the first round compiles
                rates[name].append(measured)
    alone = rates["host alone"]
    print("| placement | tokens/s | of the host alone |\n|---|---|---|")
    for name, measured in rates.items():
        ratio = statistics.median(a / b for a, b in zip(measured, alone, strict=True))
        print(f"| {name} | {statistics.median(measured):.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
