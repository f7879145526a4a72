#!/usr/bin/env bash
# From nothing (Debian, root) to a Docker engine with the image of the tests. Idempotent: a second run changes nothing.
# In: apt's own sources. Out: one dockerd that answers `docker info`, and the image $SAO_TEST_IMAGE.
set -euo pipefail

IMAGE=${SAO_TEST_IMAGE:-sao-test:bookworm}
LOG=${SAO_DOCKERD_LOG:-/var/log/sao-dockerd.log}
# Names the dockerd that was started here: one that a test may restart.
PID_FILE=${SAO_DOCKERD_PID:-/run/sao-dockerd.pid}
READY_S=60
PACKAGES=bash,ca-certificates,coreutils,git,patch,procps,python3,python3-venv

say() { echo "docker.sh: $*"; }
die() { say "$*" >&2; exit 1; }
answers() { timeout 10 docker info >/dev/null 2>&1; }

[ "$(id -u)" = 0 ] || die "run it as root"

install_packages() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    if [ ${#missing[@]} = 0 ]; then
        say "packages: present"
        return
    fi
    # The engine's package may ask what to do with old data; the install must not wait for an answer.
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
    say "packages: installed ${missing[*]}"
}

start_engine() {
    if answers; then
        say "engine: answers already"
        return
    fi
    # A second dockerd on the same data folder would corrupt it, so one that runs but does not answer is an error.
    # One that has just ended may still be a zombie.
    ! ps -C dockerd -o stat= | grep -qv '^Z' || die "engine: a dockerd runs but does not answer; see $LOG"
    setsid nohup dockerd --live-restore >>"$LOG" 2>&1 </dev/null &
    # setsid replaces itself by dockerd: a background job leads no process group.
    local daemon=$! deadline=$((SECONDS + READY_S))
    until answers; do
        kill -0 "$daemon" 2>/dev/null || die "engine: dockerd ended at once; last lines of $LOG: $(tail -n 3 "$LOG")"
        [ $SECONDS -lt $deadline ] || die "engine: no answer in $READY_S s; see $LOG"
        sleep 0.5
    done
    echo "$daemon" >"$PID_FILE"
    say "engine: started, log in $LOG"
}

apt_sources() {
    # grep's status 1 (no such file, no such suite) means: mmdebstrap takes its own defaults.
    grep -slw bookworm /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list | head -n 1 || true
}

build_image() {
    if docker image inspect "$IMAGE" >/dev/null 2>&1; then
        say "image: $IMAGE present"
        return
    fi
    local sources
    sources=$(apt_sources)
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
    mmdebstrap --quiet --variant=minbase --include="$PACKAGES" \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$WORK/root.tar" ${sources:+"$sources"}
    docker import --change 'CMD ["bash"]' --change 'WORKDIR /sandbox' \
        --change 'ENV LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1' "$WORK/root.tar" "$IMAGE" >/dev/null
    say "image: built $IMAGE"
}

install_packages
start_engine
build_image
