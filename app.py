"""The WSGI entry: `flask --app app run` and `waitress-serve app:app`.

Settings are in the file that JITLLMD_CONFIG names, or in configs/server.yaml. `jitllmd serve` does
the same from flags, and lets replies finish when it is told to end.
"""

import os
import sys
from pathlib import Path

from jitllm.errors import JitllmError
from jitllm.server import create_app, load_settings

_DEFAULT = Path(__file__).parent / "configs" / "server.yaml"

try:
    app = create_app(load_settings(os.environ.get("JITLLMD_CONFIG") or _DEFAULT))
except JitllmError as error:
    sys.exit(f"jitllmd: {error}")
