"""What jax keeps of compiled steps, and what happens to an entry that it cannot read."""

import os
import subprocess
import sys

_STEP = """
import warnings
import jax
import jax.numpy as jnp
from jitllm.compiled import keep_compiled_steps

warnings.simplefilter("error")
keep_compiled_steps()
keep_compiled_steps()

@jax.jit
def step(x):
    return x + 41

print(int(step(jnp.ones((), int))))
warnings.simplefilter("default")
warnings.warn("something else")
"""


def test_a_damaged_entry_is_written_again_and_other_warnings_are_shown(tmp_path):
    def run() -> None:
        command = [sys.executable, "-c", _STEP]
        environment = os.environ | {"JITLLM_CACHE": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
        assert done.stderr.count("Warning") == done.stderr.count("something else") == 1

    run()
    (entry,) = (tmp_path / "xla").glob("jit_step-*")
    content = entry.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"x" * len(content)):
        entry.write_bytes(damaged)
        run()
        assert entry.read_bytes() != damaged
