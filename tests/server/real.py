"""`python -m tests.server.real ARGUMENTS...` is `jitllmd ARGUMENTS...`, whatever PATH says."""

import sys

from jitllm.cli.jitllmd import main

sys.exit(main())
