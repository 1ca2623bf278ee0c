#!/bin/sh
# Renders the chart once per values file of its ci/ folder into a folder (default: tests/helm/golden).
# In that folder, all but the default are kept as their difference from it (tests/support/cluster/goldens.py).
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
difference() { # difference BASE NAME
	diff -u --label default --label "$2" "$1" "$2.yaml" >"$2.diff" || [ $? = 1 ]
	rm "$2.yaml"
}
for name in certmanager policy pickers; do
	difference default.yaml "$name"
done
# It installs no CRDs, so what it is compared with has none.
awk '/^---$/ { getline source; skip = source ~ /templates\/crds.yaml$/; if (!skip) print; $0 = source } !skip' \
	default.yaml >without-crds.yaml
difference without-crds.yaml airgapped
rm without-crds.yaml
