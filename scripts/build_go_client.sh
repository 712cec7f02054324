#!/usr/bin/env bash
# The Go client, offline: stubs and example from Debian 12 packages alone (see clients/go/README.md for their names).
#   build_go_client.sh build FILE   build the example program
#   build_go_client.sh stubs        generate clients/go/teiv1 from proto/tei.proto
#   build_go_client.sh check        fail when the stubs are stale
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The M flag gives the Go package; an option in the proto would change the descriptor that all stubs share.
generate() {
    protoc -Iproto --go_out="$1" --go_opt=paths=source_relative --go_opt=Mtei.proto=teigrpc/teiv1 \
        --go-grpc_out="$1" --go-grpc_opt=paths=source_relative --go-grpc_opt=Mtei.proto=teigrpc/teiv1 tei.proto
}

case "${1:-}" in
build)
    mkdir "$scratch/src"
    ln -s "$PWD/clients/go" "$scratch/src/teigrpc"
    # Debian's Go libraries are a GOPATH; modules would need a proxy.
    GO111MODULE=off GOFLAGS= CGO_ENABLED=0 GOPATH="$scratch:/usr/share/gocode" go build -o "$2" teigrpc/example
    ;;
stubs)
    generate clients/go/teiv1
    ;;
check)
    generate "$scratch"
    diff -ru clients/go/teiv1 "$scratch" || { echo "clients/go/teiv1 is stale: scripts/build_go_client.sh stubs" >&2; exit 1; }
    ;;
*)
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
