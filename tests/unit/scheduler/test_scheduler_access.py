"""Which API server, as whom, and in which namespace."""

from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml
from valve_kube.access import NoAccess, find, in_cluster
from valve_scheduler.webhook.certificates import renew


@pytest.fixture
def kubeconfig(tmp_path: Path) -> str:
    contexts = {"home": {"namespace": "team-a"}, "bare": {}}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "home",
        "clusters": [{"name": name, "cluster": {"server": f"http://{name}.example:8080"}} for name in contexts],
        "users": [{"name": "me", "user": {"token": "t"}}],
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": "me", **more}} for name, more in contexts.items()
        ],
    }
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(content))

    return str(path)


def test_the_namespace_is_the_one_of_the_current_context(kubeconfig: str) -> None:
    access = find({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, kubeconfig)

    assert (access.host, access.port, access.namespace) == ("home.example", 8080, "team-a")


def test_a_context_is_chosen_by_name_and_without_a_namespace_it_is_default(kubeconfig: str) -> None:
    access = find({}, kubeconfig, "bare")

    assert (access.host, access.namespace) == ("bare.example", "default")


@pytest.mark.parametrize("context", ["elsewhere", None])
def test_a_kubeconfig_that_says_nothing_of_use_is_refused_in_words(kubeconfig: str, context: str | None) -> None:
    path = kubeconfig if context else f"{kubeconfig}-absent"

    with pytest.raises(NoAccess, match="kubeconfig: "):
        find({}, path, context)


def authority() -> bytes:
    return renew(None, b"", ("x.svc",), datetime.now(timezone.utc)).bundle


def test_an_authority_that_the_cluster_replaced_is_never_unknown_until_a_restart(tmp_path: Path) -> None:
    """A process that trusts the old one alone loses the API server for good, and its probes stay well."""
    first, second = authority(), authority()
    for name, content in (("ca.crt", first), ("token", b"t"), ("namespace", b"n")):
        (tmp_path / name).write_bytes(content)
    access = in_cluster({"KUBERNETES_SERVICE_HOST": "h", "KUBERNETES_SERVICE_PORT": "1"}, tmp_path)
    assert access.tls is not None

    def replaced(content: bytes) -> int:
        """As the kubelet does it: another file in its place. How many are trusted then."""
        (tmp_path / "next").write_bytes(content)
        (tmp_path / "next").replace(tmp_path / "ca.crt")
        access.renew()
        return len(access.tls.get_ca_certs()) if access.tls else 0

    assert replaced(b"half") == 1
    assert replaced(second) == 2
    (tmp_path / "ca.crt").unlink()
    access.renew()
    assert len(access.tls.get_ca_certs()) == 2
