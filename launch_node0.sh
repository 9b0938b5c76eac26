#!/usr/bin/env bash
# Node 0. Settings: MASTER_ADDR MASTER_PORT NNODES GPUS_PER_NODE NODE_RANK NCCL_SOCKET_IFNAME JOIN_TIMEOUT (README.md).
NODE_RANK=${NODE_RANK:-0} exec bash "$(dirname "$(readlink -f "$0")")/distTest/launch.sh" "$@"
