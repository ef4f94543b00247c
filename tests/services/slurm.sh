#!/bin/bash
# A real Slurm with two nodes on this machine, from Debian's packages; needs the rights of root:
#   slurm.sh install    installs the packages if they are missing
#   slurm.sh up DIR     starts it; use it with SLURM_CONF=DIR/slurm.conf
#   slurm.sh down DIR   ends it, by the process ids of its services
set -euo pipefail
action=$1 directory=$(realpath -m "${2:-.}")
nodes='n0 n1'

install() {
    if ! command -v slurmctld slurmd munged >/dev/null; then
        apt-get update -q >/dev/null
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends \
            slurm-wlm munge >/dev/null
    fi
}

up() {
    host=$(hostname -s)
    mkdir -p "$directory/state" "$directory/log"
    # Munge refuses a directory that others can write to.
    chmod 755 "$directory"
    cat >"$directory/slurm.conf" <<C
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$directory/munge.socket
SlurmctldPort=46817
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool-%n
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/%n.pid
SlurmctldLogFile=$directory/log/slurmctld.log
SlurmdLogFile=$directory/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=20
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
C
    port=46820
    for node in $nodes; do
        mkdir -p "$directory/spool-$node"
        echo "NodeName=$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$port CPUs=4 State=UNKNOWN" \
            >>"$directory/slurm.conf"
        port=$((port + 1))
    done
    export SLURM_CONF=$directory/slurm.conf
    (umask 077 && head -c 1024 /dev/urandom >"$directory/munge.key")
    munged --force --key-file="$directory/munge.key" --socket="$directory/munge.socket" \
        --pid-file="$directory/munge.pid" --log-file="$directory/log/munge.log" \
        --seed-file="$directory/munge.seed"
    slurmctld -f "$SLURM_CONF"
    for node in $nodes; do
        slurmd -f "$SLURM_CONF" -N "$node"
    done
    for _ in $(seq 100); do
        if [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ]; then
            exit 0
        fi
        sleep 0.2
    done
    echo 'Slurm did not start:' >&2
    tail -n 20 "$directory"/log/* >&2
    exit 1
}

down() {
    SLURM_CONF=$directory/slurm.conf scancel --user=root --full 2>/dev/null || true
    for name in $nodes slurmctld munge; do
        pid=$(cat "$directory/$name.pid" 2>/dev/null || true)
        [ -n "$pid" ] || continue
        kill -TERM "$pid" 2>/dev/null || true
        for _ in $(seq 50); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
}

case $action in
install) install ;;
up) up ;;
down) down ;;
*)
    echo "usage: $0 install | up DIR | down DIR" >&2
    exit 2
    ;;
esac
