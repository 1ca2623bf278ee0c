#!/bin/sh
# Builds the real control plane, a kubelet, containerd, helm and NVIDIA's device plugin from published Go modules, once
# per change of the pinned versions; Kueue beside them. Prints the folder that holds the binaries; `KUBEBUILDER_ASSETS`, as envtest users
# expect, is taken as it is. Needs Go >= 1.26, for the plugin a C compiler. About 13 minutes on two cores with cold
# caches, 2 GB of memory.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
	echo "$KUBEBUILDER_ASSETS"
	exit 0
fi
key=$(cat "$here"/tools/*/go.mod "$here"/tools/*/go.sum | sha256sum | cut -c1-16)
bin=$here/../../.cache/cluster-tools/$key
if [ "${1:-}" = --where ] || { [ -e "$bin/.complete" ] && [ -x "$bin/kueue" ]; }; then
	echo "$bin"
	exit 0
fi
command -v go >/dev/null || {
	echo "cluster-tools: Go 1.26 or newer is needed to build the control plane; see https://go.dev/dl" >&2
	exit 1
}

mkdir -p "$bin"
exec 9>"$bin/.lock" # who comes meanwhile finds it built
flock 9
export CGO_ENABLED=0 GOFLAGS="-p=2 -trimpath -buildvcs=false"
# Without these the binaries call themselves v0.0.0 and helm's Capabilities go wrong.
stamp=k8s.io/component-base/version
kube_flags="-s -w -X $stamp.gitVersion=v1.36.3 -X $stamp.gitMajor=1 -X $stamp.gitMinor=36"

build() { # build MODULE LDFLAGS NAME PACKAGE; what an earlier run built is there
	[ ! -x "$bin/$3" ] || return 0
	echo "cluster-tools: building $3" >&2
	# Once more: a download may stumble, and what came is kept.
	make_one "$@" || make_one "$@" || return 1
	mv "$bin/$3.new" "$bin/$3"
}
make_one() {
	(cd "$here/tools/$1" && nice -n 5 go build -ldflags "$2" -o "$bin/$3.new" "$4")
}
for name in kube-apiserver kube-scheduler kube-controller-manager kubelet; do
	build kube "$kube_flags" "$name" "k8s.io/kubernetes/cmd/$name"
done
build kube "-s -w" etcd go.etcd.io/etcd/server/v3
for name in containerd containerd-shim-runc-v2 ctr; do
	build containerd "-s -w" "$name" "github.com/containerd/containerd/v2/cmd/$name"
done
build helm "-s -w" helm helm.sh/helm/v4/cmd/helm
CGO_ENABLED=1 build nvidia "-s -w" nvidia-device-plugin github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin ||
	echo "cluster-tools: NVIDIA's device plugin was not built; its stand-in serves nvidia.com/gpu" >&2
# Kueue's CRDs and its manager, from its source and with the versions of its own go.mod: what a page of the manual shows
# is held against them. Its sum is pinned in go.sum; the public list of sums does not answer everywhere.
build_kueue() (
	export GONOSUMDB='*'
	cd "$here/tools-kueue" && go mod download sigs.k8s.io/kueue && source=$(go list -m -f '{{.Dir}}' sigs.k8s.io/kueue) || return 1
	mkdir -p "$bin/kueue-crds" && cp "$source"/config/components/crd/bases/*.yaml "$bin/kueue-crds/" || return 1
	chmod u+w "$bin"/kueue-crds/* && cd "$source" || return 1
	[ -x "$bin/kueue" ] || {
		echo "cluster-tools: building kueue" >&2
		GOFLAGS="$GOFLAGS -mod=mod" nice -n 5 go build -ldflags "-s -w" -o "$bin/kueue.new" ./cmd/kueue && mv "$bin/kueue.new" "$bin/kueue"
	}
)
build_kueue || echo "cluster-tools: Kueue was not built; the tests that need it are skipped" >&2
touch "$bin/.complete"
echo "$bin"
