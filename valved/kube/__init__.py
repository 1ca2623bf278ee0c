"""What valved does on a Kubernetes node: it speaks to the kubelet, to containerd and to the API server."""
