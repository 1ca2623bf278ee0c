"""The image recipe and the list of images: what is copied exists, a mirror gets what the chart will ask it for."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from goldens import golden

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "helm/image/Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments on one line, without comments."""
    lines = [line for line in RECIPE.splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")

    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines()]


def copied() -> list[str]:
    """Sources of COPY that come from the checkout."""
    found = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    return [source for words in found for source in words[:-1]]


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_exists_and_reaches_the_builder(source: str) -> None:
    allowed = (ROOT / "helm/image/Dockerfile.dockerignore").read_text().splitlines()

    assert (ROOT / source).exists()
    assert f"!{source}" in allowed


def test_all_that_the_build_reads_is_copied() -> None:
    build = (ROOT / "meson.build").read_text()
    (rooms,) = re.findall(r"foreach room : \[(.*?)\]", build, re.S)
    needed = {room.split("/")[0] for room in re.findall(r"'([^']+)'", rooms)} | {
        "scheduler",
        "patches",
        "pyproject.toml",
    }

    assert needed <= set(copied())


def test_the_image_runs_as_nobody_from_a_pinnable_base() -> None:
    names = [name for name, _ in instructions()]
    arguments = dict(reversed(instructions()))

    assert arguments["USER"] == "65532:65532"
    assert names.index("ARG") < names.index("FROM")
    assert {rest.split()[0] for name, rest in instructions() if name == "FROM"} == {"${BASE}"}
    assert ":latest" not in RECIPE


def test_a_layer_keeps_no_package_lists_and_no_pip_cache() -> None:
    for name, rest in instructions():
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
        if name == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
        assert name != "ADD"
        assert not (name == "RUN" and "sudo" in rest)


def test_every_command_of_the_chart_is_one_that_the_image_has() -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    commands = set()
    for found in yaml.load_all(golden("default"), Loader=yaml.CSafeLoader):
        spec = (found or {}).get("spec", {}).get("template", {}).get("spec", {})
        commands |= {c["command"][0] for c in spec.get("containers", []) if "valve:" in c["image"]}

    assert commands == {"valved", "valve-scheduler"}
    assert all(re.search(rf"^{command} = ", scripts, re.M) for command in commands)


def images(text: str, *registry: str) -> list[str]:
    script = [str(ROOT / "helm/images.sh"), *registry]
    return subprocess.run(script, input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_list_of_images_is_what_the_chart_pulls() -> None:
    found = images(golden("default"))

    assert [image.split(":")[0].split("@")[0] for image in found] == [
        "ghcr.io/valve-gpu/valve",
        "registry.k8s.io/kube-scheduler",
    ]


def test_a_mirror_gets_exactly_what_the_chart_will_ask_it_for() -> None:
    values = yaml.safe_load((ROOT / "helm/valve/ci/airgapped-values.yaml").read_text())
    asked = {image.split(":")[0].split("@")[0] for image in images(golden("airgapped"))}
    copies = images(golden("default"), values["global"]["imageRegistry"])

    assert {line.split()[1].split(":")[0] for line in copies} == asked


@pytest.mark.parametrize(
    ("image", "target"),
    [
        ("registry.k8s.io/a/b:1", "m.example/a/b:1"),
        ("docker.example:5000/b:1", "m.example/b:1"),
        ("library/b:1", "m.example/library/b:1"),
        ("b:1", "m.example/b:1"),
    ],
)
def test_the_registry_alone_is_replaced(image: str, target: str) -> None:
    assert images(f"  image: {image}\n", "m.example/") == [f"{image} {target}"]
