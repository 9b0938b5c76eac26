#!/usr/bin/env bash
# One node of the run; launch_node0.sh and launch_node1.sh set its rank. Arguments go to train_fsdp.py.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export MASTER_ADDR=${MASTER_ADDR:-10.11.7.50}
export MASTER_PORT=${MASTER_PORT:-29600}
export NNODES=${NNODES:-2}
export GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export NODE_RANK
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-enp26s0np0}
export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME
# One thread per process is torchrun's own default; naming it spares its warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ -n ${VIRTUAL_ENV:-} ]]; then python=$VIRTUAL_ENV/bin/python
elif [[ -n ${CONDA_PREFIX:-} ]]; then python=$CONDA_PREFIX/bin/python
elif [[ -x $here/.venv/bin/python ]]; then python=$here/.venv/bin/python
else python=python3; fi

if [[ $NODE_RANK == 0 ]]; then role=MASTER; else role=WORKER; fi
cat <<BANNER
========================================
Launching $role NODE (Node $NODE_RANK)
Master: $MASTER_ADDR:$MASTER_PORT
Total Nodes: $NNODES
GPUs per Node: $GPUS_PER_NODE
========================================
BANNER

# In the background, so that this script hears signals; -P: a folder of the caller's may be named as a module is.
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} "$python" -P -m distTest.preflight "$@" &
preflight=$!
for signal in INT TERM HUP USR1; do trap "kill -s $signal $preflight 2>/dev/null" "$signal"; done
while kill -0 "$preflight" 2>/dev/null; do
    wait "$preflight"
done
wait "$preflight"
code=$?
if (( code > 2 )); then
    echo "ERROR: the preflight ended without a word (code $code) - see above, and the kernel's log" >&2
    exit 1
fi
(( code == 0 )) || exit "$code"
trap - INT TERM HUP USR1

# torchrun's own exit code is always 1. Here the processes leave their ids when they start, where they are, and their
# exit code and last line when they fail.
export SHARDTUNE_LAUNCH_DIR=$(mktemp -d)
trap 'rm -rf "$SHARDTUNE_LAUNCH_DIR"' EXIT
# torchrun waits for the other nodes before a process can read its configuration.
timeout_s=${JOIN_TIMEOUT:-300}
export SHARDTUNE_AGAIN='the same command with run.resume=auto resumes from the last checkpoint, if any'

# In a session of its own, so that Ctrl-C reaches this script alone.
setsid "$python" "$here/distTest/torchrun.py" \
    --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --rdzv_conf="timeout=$timeout_s" --log_dir="$SHARDTUNE_LAUNCH_DIR/torchrun" \
    "$here/train_fsdp.py" "$@" &
torchrun=$!
# Signals go to the processes, which save and then end, however long that takes. Before there are any, torchrun is all there is to end.
pass_on() {
    if [[ -s $SHARDTUNE_LAUNCH_DIR/processes ]]; then kill -s "$1" $(< "$SHARDTUNE_LAUNCH_DIR/processes")
    else kill -s TERM "$torchrun"; fi 2>/dev/null
}
for signal in INT TERM HUP USR1; do trap "pass_on $signal" "$signal"; done
trap '' PIPE  # Ctrl-C ends `tee` first
while kill -0 "$torchrun" 2>/dev/null; do
    wait "$torchrun"
done
wait "$torchrun"
code=$?
# The first process of this node that was there to the end. One that ends in order leaves no such file, whatever its code.
place=$(head -qn 1 "$SHARDTUNE_LAUNCH_DIR"/rank_*[0-9] 2>/dev/null | head -n 1)
(( code == 0 )) && [[ -z $place ]] && exit 0
if [[ -s $SHARDTUNE_LAUNCH_DIR/outcome ]]; then
    { read -r code; read -r line; } < "$SHARDTUNE_LAUNCH_DIR/outcome"
elif (( code > 128 )); then
    line="torchrun of node $NODE_RANK on $(uname -n) was ended by SIG$(kill -l $((code - 128)))${place:+ and its processes \
with it: $place} - $SHARDTUNE_AGAIN"
    code=1
elif [[ -e $SHARDTUNE_LAUNCH_DIR/processes ]]; then
    code=1 line="ended without a word: ${place:-a process of node $NODE_RANK on $(uname -n)} - see above, the other nodes' \
logs, and the kernel's log for processes killed for memory; $SHARDTUNE_AGAIN"
else
    code=2 line="node $NODE_RANK started no process - see above; start all $NNODES nodes within $timeout_s s (JOIN_TIMEOUT) \
with one MASTER_ADDR that they reach and a MASTER_PORT that is free there"
fi
echo "ERROR: $line" >&2
exit "$code"
