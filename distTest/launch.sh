#!/usr/bin/env bash
# One node of the run; launch_node0.sh and launch_node1.sh set its rank. Arguments go to train_fsdp.py.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export MASTER_ADDR=${MASTER_ADDR:-10.11.7.50}
export MASTER_PORT=${MASTER_PORT:-29600}
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-enp26s0np0}
export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME
# One thread per process is torchrun's own default; naming it spares its warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

refuse() { echo "ERROR: $1" >&2; exit 2; }
for name in MASTER_PORT NNODES GPUS_PER_NODE NODE_RANK; do
    [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name is '${!name}', which is no number - set it to one"
done
(( NODE_RANK < NNODES )) || refuse "NODE_RANK is $NODE_RANK and NNODES $NNODES - node ranks run from 0 to NNODES - 1"
if [[ -d /sys/class/net && ! -e /sys/class/net/$NCCL_SOCKET_IFNAME ]]; then
    refuse "NCCL_SOCKET_IFNAME is '$NCCL_SOCKET_IFNAME' and this node has $(echo $(ls /sys/class/net)) - name one of them"
fi

if [[ -n ${VIRTUAL_ENV:-} ]]; then python=$VIRTUAL_ENV/bin/python
elif [[ -n ${CONDA_PREFIX:-} ]]; then python=$CONDA_PREFIX/bin/python
elif [[ -x $here/.venv/bin/python ]]; then python=$here/.venv/bin/python
else python=python3; fi

if (( NODE_RANK == 0 )); then role=MASTER; else role=WORKER; fi
cat <<BANNER
========================================
Launching $role NODE (Node $NODE_RANK)
Master: $MASTER_ADDR:$MASTER_PORT
Total Nodes: $NNODES
GPUs per Node: $GPUS_PER_NODE
========================================
BANNER

# torchrun's own exit code is always 1; the processes leave theirs, with their last line, in this file.
outcome=$(mktemp)
rm "$outcome"
export SHARDTUNE_EXIT_FILE=$outcome
trap 'rm -f "$outcome"' EXIT

"$python" -m torch.distributed.run \
    --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \
    "$here/train_fsdp.py" "$@"
code=$?
if (( code != 0 )) && [[ -s $outcome ]]; then
    { read -r code; read -r line; } < "$outcome"
    echo "ERROR: $line" >&2
elif (( code != 0 )); then
    echo "ERROR: torchrun on node $NODE_RANK ended with $code and no process said why - see above, and the other nodes' logs" >&2
fi
exit "$code"
