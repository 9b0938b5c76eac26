#!/usr/bin/env bash
# Node 0. Environment: MASTER_ADDR MASTER_PORT NNODES GPUS_PER_NODE NODE_RANK NCCL_SOCKET_IFNAME
# JOIN_TIMEOUT JOIN_SECRET MAX_RESTARTS (./launch_node0.sh --help). Arguments go to train_fsdp.py.
refuse() {
    echo "ERROR: $1" >&2
    exit 2
}
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
python=python3
if [ -x "$here/.venv/bin/python" ]; then python=$here/.venv/bin/python; fi
if [ -n "${CONDA_PREFIX:-}" ]; then python=$CONDA_PREFIX/bin/python; fi
if [ -n "${VIRTUAL_ENV:-}" ]; then python=$VIRTUAL_ENV/bin/python; fi
command -v "$python" > /dev/null || refuse "$python does not exist - activate the environment of \
requirements.txt, or unset VIRTUAL_ENV and CONDA_PREFIX where they name one that is gone"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null || refuse "$python is \
older than Python 3.11, which transformers needs - activate the environment of requirements.txt"
# -P: a folder of the caller's may be named as a module is.
export NODE_RANK=${NODE_RANK:-0} PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -P -m shardtune.cluster "$@"
