#!/usr/bin/env bash
# One node of the run; launch_node0.sh and launch_node1.sh set its rank. Arguments go to train_fsdp.py.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

end_early() {
    echo "ERROR: ended by SIG$1 during the preflight - run the same command again" >&2
    exit 1
}
for signal in INT TERM HUP; do trap "end_early $signal" "$signal"; done

for argument; do
    if [[ $argument == -h || $argument == --help ]]; then
        cat "$here/distTest/environment.txt"
        set -- --help
    fi
done

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
# A carriage return from a file of settings must not rewrite the line.
shown() { printf %q "$1"; }
[[ ${1:-} == --help ]] || cat <<BANNER
========================================
Launching $role NODE (Node $(shown "$NODE_RANK"))
Master: $(shown "$MASTER_ADDR"):$(shown "$MASTER_PORT")
Total Nodes: $(shown "$NNODES")
GPUs per Node: $(shown "$GPUS_PER_NODE")
========================================
BANNER
if ! command -v "$python" > /dev/null; then
    echo "ERROR: there is no $python - activate the environment of requirements.txt, or unset VIRTUAL_ENV and \
CONDA_PREFIX where they name one that is gone" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' > /dev/null; then
    echo "ERROR: $python is older than Python 3.11, for which transformers has no release that this needs - activate \
the environment of requirements.txt" >&2
    exit 2
fi
if [[ ${1:-} == --help ]]; then exec "$python" "$here/train_fsdp.py" --help; fi

room=65536  # bytes, more than all that it takes
# Processes of this launch leave here what the script and each other should know: see files of shardtune/cluster/torchrun.py.
if ! SHARDTUNE_LAUNCH_DIR=$(mktemp -d -t shardtune.XXXXXX) ||
    ! head -c "$room" /dev/zero > "$SHARDTUNE_LAUNCH_DIR/room" || ! rm "$SHARDTUNE_LAUNCH_DIR/room"; then
    [[ -z $SHARDTUNE_LAUNCH_DIR ]] || rm -rf "$SHARDTUNE_LAUNCH_DIR"
    echo "ERROR: no temporary folder can be made in ${TMPDIR:-/tmp} - make room there, or set TMPDIR" >&2
    exit 2
fi
export SHARDTUNE_LAUNCH_DIR
trap 'rm -rf "$SHARDTUNE_LAUNCH_DIR" 2>/dev/null' EXIT
export SHARDTUNE_LAUNCHER_PID=$$

# With job control on, what starts in the background has a process group of its own: Ctrl-C reaches this script alone,
# which passes it on.
set -m
# -P: a folder of the caller's may be named as a module is.
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} "$python" -P -m distTest.preflight "$@" &
set +m
preflight=$!
signalled=
for signal in INT TERM HUP USR1; do trap "signalled=$signal; kill -s $signal $preflight 2>/dev/null" "$signal"; done
while kill -0 "$preflight" 2>/dev/null; do
    wait "$preflight"
done
wait "$preflight"
code=$?
if [[ -n $signalled ]] && (( code < 0 || code > 2 )); then  # while it began, or as it ended: bash may not know its code
    echo "1 ended by SIG$signalled during the preflight - run the same command again" > "$SHARDTUNE_LAUNCH_DIR/told"
    sleep 1
    end_early "$signalled"
fi
if (( code < 0 || code > 2 )); then
    echo "ERROR: the preflight ended without a word (code $code) - see above, and the kernel's log" >&2
    exit 1
fi
(( code == 0 )) || exit "$code"

export SHARDTUNE_AGAIN='the same command with run.resume=auto resumes from the last checkpoint, if any'
# Signals go to the processes, which save and then end, however long that takes. Before there are any, torchrun is all
# there is to end.
pass_on() {
    signalled=$1
    if [[ -s $SHARDTUNE_LAUNCH_DIR/processes ]]; then kill -s "$1" $(< "$SHARDTUNE_LAUNCH_DIR/processes")
    else kill -s TERM "$torchrun"; fi 2>/dev/null
}
set -m
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} "$python" -P -m shardtune.cluster.torchrun \
    --nnodes="$NNODES" --node_rank="$NODE_RANK" --nproc_per_node="$GPUS_PER_NODE" \
    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" --rdzv_conf="timeout=${JOIN_TIMEOUT:-300}" \
    --log_dir="$SHARDTUNE_LAUNCH_DIR/torchrun" "$here/train_fsdp.py" "$@" &
set +m
torchrun=$!
for signal in INT TERM HUP USR1; do trap "pass_on $signal" "$signal"; done
[[ -n $signalled ]] && pass_on "$signalled"  # between the two
trap '' PIPE  # Ctrl-C ends `tee` first
while kill -0 "$torchrun" 2>/dev/null; do
    { wait "$torchrun"; } 2>/dev/null
done
{ wait "$torchrun"; } 2>/dev/null
code=$?
(( code == 0 )) && exit 0
said=32  # added to the code where the last line stands already, see SAID of shardtune/cluster/local_ranks.py
# Where a rank was that was killed with its torchrun.
places=("$SHARDTUNE_LAUNCH_DIR"/rank_*[0-9])
place=$(head -n 1 "${places[0]}" 2>/dev/null)
node="node $NODE_RANK on $(uname -n)"
if [[ -s $SHARDTUNE_LAUNCH_DIR/outcome ]]; then
    { read -r code; read -r line; } < "$SHARDTUNE_LAUNCH_DIR/outcome"
elif (( code > said && code <= 128 )); then
    exit $((code - said))
elif [[ -n $signalled ]] && (( code == 128 + $(kill -l TERM) )); then
    code=1 line="ended by SIG$signalled before the first step, with nothing to save - run the same command again"
elif (( code > 128 )); then
    line="torchrun of $node was ended by SIG$(kill -l $code)${place:+ and its processes with it: $place} - \
$SHARDTUNE_AGAIN"
    code=1
else
    code=1 line="ended without a word: a process of $node - see above, the other nodes' logs, and the kernel's log for \
processes killed for memory; $SHARDTUNE_AGAIN"
fi
if [[ ! -e $SHARDTUNE_LAUNCH_DIR/watched ]]; then  # the other nodes hear of it by this, see shardtune/cluster/handover.py
    echo "$code $line" > "$SHARDTUNE_LAUNCH_DIR/told"
    sleep 1
fi
echo "ERROR: $line" >&2
exit "$code"
