"""The real control plane for tests marked `cluster`: built once, started once for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries
from valve_tools.cluster.fleet import install_crds

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """API server, etcd and controller manager with Valve's CRDs; no scheduler, no nodes."""
    try:
        programs = binaries(ROOT)
    except NotBuilt as reason:
        pytest.skip(str(reason))
    plane = ControlPlane(tmp_path_factory.mktemp("cluster"), programs)
    try:
        plane.start()
        install_crds(plane.api, ROOT / "helm/valve")
        yield plane
    finally:
        plane.stop()
