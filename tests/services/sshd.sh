#!/bin/bash
# A real sshd on the loopback interface, with keys, a port and a configuration of its own:
#   sshd.sh install    installs Debian's packages if they are missing
#   sshd.sh up DIR     starts it; 127.0.0.1 and 127.0.0.2 are two hosts for DIR/ssh_config
#   sshd.sh down DIR   ends it
set -euo pipefail
action=$1 directory=$(realpath -m "${2:-.}")

install() {
    if [ ! -x /usr/sbin/sshd ] || ! command -v ssh > /dev/null; then
        apt-get update -q > /dev/null
        # Without a service of its own: the package would start one at port 22.
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -q --no-install-recommends \
            openssh-server openssh-client > /dev/null
    fi
}

up() {
    mkdir -p "$directory" /run/sshd
    chmod 700 "$directory"
    cd "$directory"
    ssh-keygen -q -t ed25519 -N '' -f host_key
    ssh-keygen -q -t ed25519 -N '' -f user_key
    cp user_key.pub authorized_keys
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    cat > sshd_config << END
Port $port
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey $directory/host_key
AuthorizedKeysFile $directory/authorized_keys
PidFile $directory/sshd.pid
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
MaxStartups 50
END
    for address in 127.0.0.1 127.0.0.2; do
        echo "[$address]:$port $(cat host_key.pub)"
    done > known_hosts
    cat > ssh_config << END
Host 127.0.0.*
    Port $port
    User $(id -un)
    IdentityFile $directory/user_key
    IdentitiesOnly yes
    UserKnownHostsFile $directory/known_hosts
    GlobalKnownHostsFile /dev/null
END
    /usr/sbin/sshd -f "$directory/sshd_config" -E "$directory/sshd.log"
    for _ in $(seq 50); do
        if ssh -F ssh_config -o BatchMode=yes 127.0.0.2 true 2> /dev/null; then
            exit 0
        fi
        sleep 0.1
    done
    echo 'sshd does not answer:' >&2
    cat sshd.log >&2
    exit 1
}

down() {
    if [ -f "$directory/sshd.pid" ]; then
        kill "$(cat "$directory/sshd.pid")"
    fi
}

"$action"
