#!/bin/sh
# Check that a backup of a running drafter can be restored: save, copy the snapshot folder, and load every namespace of
# the copy in a second service. The running service only saves. Needs the memory of the service once more.
#
#     restore-drill.sh unix:/run/ssd-drafter/drafter.sock /var/lib/ssd-drafter
#
# Further arguments are flags of the second service: give those of the running one that decide what it can load, such as
# --capacity 64M. Exits with 0 if every namespace was loaded; prints them with their tokens.
set -eu
address=$1
folder=$2
shift 2

drill=$(mktemp -d)
copy="unix:$drill/drafter.sock"
trap 'kill "${service:-}" 2>/dev/null || true; wait; rm -rf "$drill"' EXIT

ssd-drafter snapshot --address "$address"
cp -R "$folder/." "$drill/snapshots" # with DynamicUser of systemd the folder is a link

# Without the shared log and the port of metrics that the flags may name.
ssd-drafter serve "$@" --listen "$copy" --snapshot-folder "$drill/snapshots" --log= --metrics= >"$drill/log" 2>&1 &
service=$!
ssd-drafter health --address "$copy" --wait 300

# Learning from an empty file loads a namespace, and changes nothing; it is an error, whose text says so.
: >"$drill/empty.jsonl"
for namespace in "$drill"/snapshots/*/; do
    ssd-drafter warm --address "$copy" --namespace "$(basename "$namespace")" --from "$drill/empty.jsonl" >"$drill/warm" 2>&1 ||
        grep -q "nothing was learned" "$drill/warm" || { cat "$drill/warm"; exit 1; }
done
ssd-drafter namespaces --address "$copy"

if grep -q "snapshot refused" "$drill/log"; then
    echo "could not be restored:" >&2
    grep "snapshot refused" "$drill/log" >&2
    exit 1
fi
echo "restored all namespaces"
