"""The chart on the control plane of the tests, where no node runs the pods of its hooks."""

from pathlib import Path

from valve_tools.cluster import helm
from valve_tools.cluster.controlplane import ControlPlane

CHART = Path(__file__).resolve().parents[3] / "helm/valve"


class Helm(helm.Helm):
    """Real helm without hooks."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane, CHART)

    def install(self, *flags: str) -> str:
        # The CRDs of the session are there already and become the release's.
        return super().install("--no-hooks", "--take-ownership", *flags)

    def uninstall(self, *flags: str) -> str:
        return super().uninstall("--no-hooks", *flags)
