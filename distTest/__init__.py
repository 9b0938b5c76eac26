"""What proves, before and beside a run, that machines can train together."""

import sys
from importlib.util import find_spec

# Said here because every program of this folder begins here, and would otherwise end in an import's traceback.
_MISSING = [
    name
    for name in ("torch", "transformers", "datasets", "accelerate", "psutil", "yaml")
    if not find_spec(name)
]
if _MISSING:
    print(
        f"ERROR: {sys.executable} has no {', '.join(_MISSING)} - activate the environment that has requirements.txt "
        "(make setup; source .venv/bin/activate)",
        file=sys.stderr,
    )
    sys.exit(2)
