"""The agent of one node, as the launch scripts start it: python -m shardtune.cluster [arguments of
train_fsdp.py]"""

import os
import signal
import sys


def _end(number: int, frame: object) -> None:
    """Until the agent listens to signals itself."""
    name = signal.Signals(number).name
    line = f"ERROR: ended by {name} during the preflight - run the same command again\n"
    os.write(2, line.encode())
    os._exit(1)


for _number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) != signal.SIG_IGN:
        signal.signal(_number, _end)

if __name__ == "__main__":
    from shardtune.errors import require_packages

    require_packages()
    from shardtune.cluster.agent import main

    main(sys.argv[1:])
