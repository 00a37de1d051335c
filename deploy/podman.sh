#!/bin/bash
# Builds the three images with podman, runs a small system of them, asks it something, and ends what it began.
#
#   deploy/podman.sh [--dry-run] [--name NAME] [--targets "gateway cpu gpu"] [--remove-images]
#
# Without root. Of the system the gateway is of the target `gateway`, the workers are of `cpu`. Containers, network and
# volume are named after NAME and removed at the end, also after a failure; images stay, unless --remove-images.
# --dry-run prints each command and runs none.
set -eu -o pipefail

dry_run='' remove_images='' targets='gateway cpu gpu'
name=diptych-try-$$
while (($#)); do
    case $1 in
        --dry-run) dry_run=yes ;;
        --remove-images) remove_images=yes ;;
        --name) name=${2:?--name: of the containers} && shift ;;
        --targets) targets=${2:?--targets: those of the Dockerfile} && shift ;;
        *) echo "$0: $1: not an option" >&2 && exit 2 ;;
    esac
    shift
done
for target in $targets; do
    case $target in
        gateway | cpu | gpu) ;;
        *) echo "$0: --targets $target: not a target of the Dockerfile" >&2 && exit 2 ;;
    esac
done
cd "$(dirname "$0")/.."

python=/opt/diptych/bin/python
wait_s=300  # for the weights and a probe inference on one core
began=()    # containers, in the order of their start
made=()     # network and volume

run() {
    if [ "$dry_run" ]; then
        printf '%q ' "$@" && echo
    else
        "$@"
    fi
}

image() { echo "localhost/$name-$1"; }

end() {
    local status=$? kind
    trap - EXIT
    if ((status)) && [ ! "$dry_run" ]; then
        for one in "${began[@]}"; do
            echo "== the last lines of $one" && podman logs --tail 20 "$one" || true
        done >&2
    fi
    for one in "${began[@]}"; do run podman rm --force --volumes --time 0 "$one" >&"$out" || true; done
    for kind in "${made[@]}"; do run podman "$kind" rm --force "$name" >&"$out" || true; done
    if [ "$remove_images" ]; then
        for target in $targets; do run podman image rm --force "$(image "$target")" >&"$out" || true; done
    fi
    exit "$status"
}
# What podman says about each object is of no use; the commands of a dry run are.
exec {null}>/dev/null
out=$null
[ ! "$dry_run" ] || out=1
trap end EXIT
trap 'exit 130' INT TERM

build() {
    run podman build --file deploy/Dockerfile --target "$1" --tag "$(image "$1")" .
    # By number, as Kubernetes asks; and the bill of materials is there.
    run podman run --rm --network none --entrypoint "$python" "$(image "$1")" -c \
        'import os; assert os.getuid() == 10001; assert os.path.getsize("/opt/diptych/sbom.json")'
    run podman image inspect --format '{{index .RepoTags 0}} {{.Size}} bytes' "$(image "$1")"
}

# start PART IMAGE OPTION... -- ARGUMENT...: one container, without rights, that writes to volumes and tmpfs only.
start() {
    local container=$name-$1 image=$2 options=()
    shift 2
    while [ "$1" != -- ]; do options+=("$1") && shift; done
    shift
    began+=("$container")
    run podman run --detach --name "$container" --network "$name" --init --read-only --cap-drop all \
        --security-opt no-new-privileges "${options[@]}" "$image" "$@" >&"$out"
}

# program PART IMAGE MEMORY OPTION... -- ARGUMENT...: one of ours, by user 10001. The image has no curl.
program() {
    local part=$1 image=$2 memory=$3
    shift 3
    local probe="from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/ready', timeout=5)"
    start "$part" "$image" --user 10001:10001 --cpus 1 --memory "$memory" \
        --env "DIPTYCH_REDIS_URL=redis://$name-valkey:6379/0" --env DIPTYCH_HOST=0.0.0.0 --env DIPTYCH_INSECURE=true \
        --env DIPTYCH_QUANTIZATION=int8 --health-cmd "$python -c \"$probe\"" --health-interval disable "$@"
}

# By hand, since podman's own timer needs systemd.
await_health() {
    local end_at=$((SECONDS + wait_s))
    until run podman healthcheck run "$name-$1" >&"$out" 2>&1; do
        ((SECONDS < end_at)) || { echo "$0: $1 is not ready after $wait_s s" >&2 && exit 1; }
        sleep 1
    done
}

# It drains at SIGTERM and leaves with 0.
stop() {
    run podman stop --time 30 "$name-$1" >&"$out"
    local status
    status=$(run podman inspect --format '{{.State.ExitCode}}' "$name-$1")
    [ ! "$dry_run" ] || { echo "$status" && return; }
    [ "$status" = 0 ] || { echo "$0: $1 ended with exit code $status" >&2 && exit 1; }
}

for target in $targets; do build "$target"; done
if [[ " $targets " != *' gateway '* || " $targets " != *' cpu '* ]]; then
    echo "Built $targets. A system takes gateway and cpu."
    exit
fi

made+=(network) && run podman network create "$name" >&"$out"
made+=(volume) && run podman volume create "$name" >&"$out"
start valkey docker.io/valkey/valkey:9 --user 999:999 -- valkey-server --save '' --appendonly no
program prefill "$(image cpu)" 2g -- prefill --grpc-port 50061 --http-port 8000 --advertise-host "$name-prefill"
program decode "$(image cpu)" 2g --env DIPTYCH_KV_MEMORY_MIB=256 -- \
    decode --grpc-port 50062 --http-port 8000 --advertise-host "$name-decode"
# U: the volume is the user's.
program gateway "$(image gateway)" 1g --volume "$name:/batches:U" -- \
    gateway --grpc-port 50051 --http-port 8000 --batch-dir /batches
for part in prefill decode gateway; do await_health "$part"; done

# From a container of its own, so that names and network are tried as well.
question='
import json, sys, urllib.request
asked = {"model": "SmolLM2-135M-Instruct", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}
request = urllib.request.Request(sys.argv[1], json.dumps(asked).encode(), {"content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
print(answer["choices"][0]["message"]["content"])
assert answer["usage"]["completion_tokens"] > 0'
run podman run --rm --network "$name" --entrypoint "$python" "$(image gateway)" -c "$question" \
    "http://$name-gateway:8000/v1/chat/completions"

for part in gateway decode prefill; do stop "$part"; done
