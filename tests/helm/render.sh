#!/bin/sh
# Renders the chart once per values file of its ci/ folder into a folder (default: tests/helm/golden).
# In that folder, those that hardly differ from the default are kept as their difference (tests/support/cluster/goldens.py).
# Needs helm: HELM=/path/to/helm, or the one `make cluster-tools` built.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$root/tests/helm/golden}
helm=${HELM:-$("$root/tests/cluster/build_tools.sh" --where)/helm}

render() { # render NAME KUBERNETES-VERSION
	"$helm" template valve "$root/helm/valve" --namespace valve-system --values "$root/helm/valve/ci/$1-values.yaml" \
		--kube-version "$2" --api-versions monitoring.coreos.com/v1 >"$out/$1.yaml"
}
mkdir -p "$out"
render default 1.36.0
render airgapped 1.30.0
render certmanager 1.33.1
render policy 1.36.0
render pickers 1.36.0

[ "$out" = "$root/tests/helm/golden" ] || exit 0
cd "$out"
for name in certmanager policy pickers; do
	diff -u --label default --label "$name" default.yaml "$name.yaml" >"$name.diff" || [ $? = 1 ]
	rm "$name.yaml"
done
