#!/bin/bash
# A real Ray cluster of one node, from the package in .venv:
#   ray.sh up DIR     starts it, and prints its address; its token is in DIR/token
#   ray.sh down DIR   ends it, by the process id of its first process
set -euo pipefail
action=$1 directory=$2
bin=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin

case $action in
up)
    mkdir -p "$directory"
    "$bin/python" -c 'import ray' 2>/dev/null || "$bin/python" -m pip install --quiet 'ray[data,train]'
    # Its own token: without it, any process of the machine could run code in the cluster.
    (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$directory/token")
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$directory/token"
    # Several tests share the node, whatever it has: tasks need one core of Ray each.
    setsid "$bin/ray" start --head --block --port=46379 --num-cpus=8 --include-dashboard=false \
        --node-ip-address=127.0.0.1 --disable-usage-stats --temp-dir="$directory/session" \
        >"$directory/log" 2>&1 </dev/null &
    echo $! >"$directory/pid"
    for _ in $(seq 120); do
        if grep -q 'Ray runtime started' "$directory/log"; then
            echo 127.0.0.1:46379
            exit 0
        fi
        sleep 0.5
    done
    echo "Ray did not start:" >&2
    cat "$directory/log" >&2
    exit 1
    ;;
down)
    pid=$(cat "$directory/pid")
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 60); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.5
    done
    # What is left of its session: `setsid` made the first process its leader.
    kill -KILL -- "-$pid" 2>/dev/null || true
    rm -rf "$directory/session"
    ;;
*)
    echo "usage: $0 up|down DIR" >&2
    exit 2
    ;;
esac
