"""The checks that the launch scripts make before a run, alone.

python -m distTest.preflight [arguments of train_fsdp.py], with the environment of a launch script
"""

from __future__ import annotations

import sys

from shardtune.cluster.agent import main

if __name__ == "__main__":
    main(sys.argv[1:], checks_only=True)
