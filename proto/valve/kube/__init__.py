"""Stubs of what Kubernetes speaks on a node: the kubelet's device plugins and pod resources, containerd's NRI."""
