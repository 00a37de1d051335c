#!/bin/bash
# Installs the chart into the cluster of the current context, asks it something through restarts, and removes it.
#
#   deploy/cluster.sh [--dry-run] [--namespace NAME] [--image REPOSITORY:TAG] [--kind CLUSTER] [--values FILE] [--groups]
#
# Needs kubectl, helm, curl, openssl and `diptych`. The namespace must not exist; it is made and removed. --kind loads the
# image into the nodes of a kind cluster first. --groups has decode workers of two nodes each, for which the cluster needs
# LeaderWorkerSet's controller. --dry-run prints each command and runs none.
set -eu -o pipefail

dry_run='' kind='' values='' groups='' image=registry.example/diptych:0.1.0 namespace=diptych-try
while (($#)); do
    case $1 in
        --dry-run) dry_run=yes ;;
        --groups) groups=yes ;;
        --namespace) namespace=${2:?--namespace: one that does not exist} && shift ;;
        --image) image=${2:?--image: REPOSITORY:TAG} && shift ;;
        --kind) kind=${2:?--kind: name of the cluster} && shift ;;
        --values) values=${2:?--values: a file} && shift ;;
        *) echo "$0: $1: not an option" >&2 && exit 2 ;;
    esac
    shift
done
[[ ${image##*/} == *:* ]] || { echo "$0: --image $image: it needs a tag" >&2 && exit 2; }
cd "$(dirname "$0")/.."

run() {
    if [ "$dry_run" ]; then
        printf '%q ' "$@" && echo
    else
        "$@"
    fi
}

work=$(mktemp -d) forward='' made=''
end() {
    local status=$?
    trap - EXIT
    [ ! "$forward" ] || kill "$forward" 2>/dev/null || true
    if ((status)) && [ "$made" ] && [ ! "$dry_run" ]; then
        kubectl get pods -n "$namespace" --output wide >&2 || true
        kubectl logs -n "$namespace" --selector app.kubernetes.io/name=diptych --tail 20 --prefix >&2 || true
    fi
    if [ "$made" ]; then
        run helm uninstall diptych --namespace "$namespace" --ignore-not-found || true
        run kubectl delete namespace "$namespace" --wait=false || true
    fi
    rm -rf "$work"
    exit "$status"
}
trap end EXIT
trap 'exit 130' INT TERM

# The key is printed on stderr, its record on stdout.
if [ "$dry_run" ]; then
    run diptych key new --tenant try
    key=KEY
else
    (umask 077 && diptych key new --tenant try >"$work/keys.jsonl" 2>"$work/key")
    key=$(grep -o 'dk-[A-Za-z0-9_-]*' "$work/key")
fi

[ ! "$kind" ] || run kind load docker-image "$image" --name "$kind"
run kubectl create namespace "$namespace"
made=yes
# As strict as a namespace can be.
run kubectl label namespace "$namespace" pod-security.kubernetes.io/enforce=restricted
run kubectl create secret generic -n "$namespace" diptych-keys --from-file="keys.jsonl=$work/keys.jsonl"
run kubectl create secret generic -n "$namespace" diptych --from-literal=secret="$(openssl rand -hex 32)" \
    --from-literal=directory-password="$(openssl rand -hex 16)" --from-literal=rank-key="$(openssl rand -hex 32)"

chosen=(--values deploy/chart/values-small.yaml --set "image.repository=${image%:*},image.tag=${image##*:}")
[ ! "$values" ] || chosen+=(--values "$values")
[ ! "$groups" ] || chosen+=(--set 'decode.hosts=2,decode.tensorParallel=2')
# Two decode workers, so that one may restart; --wait does not know the groups.
run helm install diptych deploy/chart --namespace "$namespace" "${chosen[@]}" --set decode.replicas=2,decode.surge=true

decode=deployment/diptych-decode
[ ! "$groups" ] || decode=leaderworkerset/diptych-decode
await() {
    run kubectl rollout status -n "$namespace" deployment/diptych-gateway deployment/diptych-prefill --timeout=10m
    if [ "$groups" ]; then
        run kubectl wait -n "$namespace" "$decode" --for=condition=Available --timeout=10m
    else
        run kubectl rollout status -n "$namespace" "$decode" --timeout=10m
    fi
}
await

if [ "$dry_run" ]; then
    run kubectl port-forward -n "$namespace" service/diptych 18000:8000
else
    kubectl port-forward -n "$namespace" service/diptych 18000:8000 >/dev/null &
    forward=$!
fi
ask() {
    run curl --silent --show-error --fail --retry 10 --retry-connrefused http://127.0.0.1:18000/v1/completions \
        --header "authorization: Bearer $key" --header 'content-type: application/json' \
        --data '{"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time", "max_tokens": 200, "temperature": 0}' \
        --output "$work/$1.json"
}
text() { sed 's/.*"text": *"\([^"]*\)".*/\1/' "$work/$1.json"; }

# beside NAME COMMAND...: runs a command while a text is streamed into NAME.
beside() {
    local name=$1 asked=''
    shift
    if [ "$dry_run" ]; then ask "$name"; else ask "$name" & asked=$!; fi
    run "$@"
    [ ! "$asked" ] || wait "$asked"
}

ask before
# A worker that is lost in mid-stream, and all of a role replaced one by one: the text stays the same.
lost=pod/diptych-decode-0
[ "$dry_run" ] || lost=$(kubectl get pods -n "$namespace" --selector app.kubernetes.io/component=decode --output name | head -1)
beside killed kubectl delete "$lost" -n "$namespace" --grace-period=0 --force
await
beside replaced kubectl rollout restart -n "$namespace" deployment/diptych-prefill
await
if [ ! "$dry_run" ]; then
    for one in killed replaced; do
        [ "$(text before)" = "$(text $one)" ] || { echo "$0: another text once workers were $one" >&2 && exit 1; }
    done
    echo "The same text before, while workers were killed, and while they were replaced."
fi
