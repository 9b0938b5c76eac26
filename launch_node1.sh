#!/usr/bin/env bash
# Node 1: as launch_node0.sh, with another rank.
NODE_RANK=${NODE_RANK:-1} exec bash "$(dirname "$(readlink -f "$0")")/launch_node0.sh" "$@"
