"""A real Envoy that asks an endpoint picker, before played engines. It comes from PyPI (`make foreign`)."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from ports import free_ports

TYPE = "type.googleapis.com/envoy"
WAIT_S = 200.0  # ends only a hung test


def envoy() -> str | None:
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def address(port):
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def cluster(name, ports, **more):
    endpoints = [{"endpoint": {"address": address(port)}} for port in ports]
    assigned = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "2s", "load_assignment": assigned, **more}


DUPLEX = "FULL_DUPLEX_STREAMED"


def configuration(port, admin, picker, engines, *, asked=DUPLEX, answered=DUPLEX, subset=None, allow=False, tls=False):
    """As gateways set it up: ext-proc chooses, the override host is taken, and a dead one is passed over once."""
    balancing = f"{TYPE}.extensions.load_balancing_policies"
    round_robin = {"name": "round robin", "typed_config": {"@type": f"{balancing}.round_robin.v3.RoundRobin"}}
    chosen = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}
    override = {
        "@type": f"{balancing}.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": chosen}],
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    namespaces = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}
    trailers = "SEND" if DUPLEX in (asked, answered) else "SKIP"
    external = {
        "@type": f"{TYPE}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "30s"},
        "failure_mode_allow": allow,
        "message_timeout": "30s",
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": asked,
            "response_body_mode": answered,
            "request_trailer_mode": trailers,
            "response_trailer_mode": trailers,
        },
        "response_attributes": ["upstream.address"],
        "metadata_options": {"forwarding_namespaces": namespaces, "receiving_namespaces": {"untyped": ["envoy.lb"]}},
    }
    filters = [
        {"name": "picker", "typed_config": external},
        {"name": "router", "typed_config": {"@type": f"{TYPE}.extensions.filters.http.router.v3.Router"}},
    ]
    if subset is not None:
        value = {"x-gateway-destination-endpoint-subset": subset}
        hint = {"metadata_namespace": "envoy.lb.subset_hint", "value": value}
        metadata = {"@type": f"{TYPE}.extensions.filters.http.set_metadata.v3.Config", "metadata": [hint]}
        filters.insert(0, {"name": "subset", "typed_config": metadata})
    retry = {"retry_on": "connect-failure,refused-stream", "num_retries": 1}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "60s", "retry_policy": retry}}
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    http2 = {
        "@type": f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    options = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    asks = cluster("picker", [picker], typed_extension_protocol_options=options)
    if tls:
        context = {"@type": f"{TYPE}.extensions.transport_sockets.tls.v3.UpstreamTlsContext"}
        asks["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
    policy = {"policies": [{"typed_extension_config": {"name": "override", "typed_config": override}}]}
    listener = {
        "address": address(port),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {
        "admin": {"address": address(admin)},
        "static_resources": {
            "listeners": [listener],
            "clusters": [asks, cluster("engines", engines, load_balancing_policy=policy)],
        },
    }


@contextlib.contextmanager
def gateway(folder, port_of_picker, engines, picker=None, **more):
    """Its URL, once it serves. `picker`: a port where none is."""
    port, admin = free_ports(2)
    picker = picker or port_of_picker
    written = Path(folder) / f"envoy-{port}.json"
    written.write_text(json.dumps(configuration(port, admin, picker, engines, **more)))
    log = written.with_suffix(".log")
    argv = [envoy(), "-c", str(written), "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"]
    with log.open("w") as out, subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            until = time.monotonic() + WAIT_S
            while not answers(f"http://127.0.0.1:{admin}/ready"):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, "Envoy did not come up"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def answers(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return answer.status == 200
    return False
