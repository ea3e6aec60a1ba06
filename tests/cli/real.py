"""`python -m tests.cli.real ARGUMENTS...` is `jitllm ARGUMENTS...`, whatever PATH says."""

import sys

from jitllm.cli.jitllm import main

sys.exit(main())
