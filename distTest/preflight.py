"""The checks that the launch scripts make before a run, alone.

python -m distTest.preflight [arguments of train_fsdp.py], with the environment of a launch script
"""

import sys

from shardtune.errors import require_packages

if __name__ == "__main__":
    require_packages()
    from shardtune.cluster.agent import main

    main(sys.argv[1:], checks_only=True)
