"""Which API server, as whom, and in which namespace."""

from pathlib import Path

import pytest
import yaml
from valve_kube.access import NoAccess, find


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
