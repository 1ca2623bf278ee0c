"""docs/finetuning.md: the Job and the volume of its cluster section are valid and pass the webhook; its flags exist."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from valve_kube import names
from valve_kube.objects import kind_of, offline_pod
from valve_scheduler.webhook.admission import AdmissionSettings, mutate_offline

ROOT = Path(__file__).resolve().parents[2]
MANUAL = (ROOT / "docs/finetuning.md").read_text()
OBJECTS: dict[str, dict[str, Any]] = {
    found["kind"]: found
    for found in (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", MANUAL, re.DOTALL))
}
FIELDS = set(re.findall(r"^    ([a-z_0-9]+): ", (ROOT / "tune/valve_tune/train/spec.py").read_text(), re.MULTILINE))


def job_arguments() -> list[str]:
    (container,) = OBJECTS["Job"]["spec"]["template"]["spec"]["containers"]
    return [str(each) for each in container["args"]]


@pytest.mark.parametrize("kind", ["Job", "PersistentVolumeClaim"])
def test_the_examples_are_valid(kind: str) -> None:
    kubernetes_validate.validate(OBJECTS[kind], "1.36", strict=True)


def test_the_job_passes_the_webhook_with_its_volume_and_its_preference() -> None:
    template = OBJECTS["Job"]["spec"]["template"]
    claim = template["spec"]["volumes"][0]
    metadata = {"name": "p", "namespace": "default", "uid": "u", **template["metadata"]}
    pod = {"metadata": metadata, "spec": template["spec"]}
    admitted = mutate_offline(pod, AdmissionSettings())
    wanted = offline_pod(admitted)

    assert (wanted.gpus, wanted.sla) == (1, 0.0)
    assert claim in admitted["spec"]["volumes"]
    assert claim["persistentVolumeClaim"]["claimName"] == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    assert (kind_of(admitted), wanted.base) == (names.FINETUNE, "llama-8b")


def test_each_flag_of_the_manual_is_a_field_of_a_job() -> None:
    """The command's own flags and those of other programs stand in code that begins otherwise."""
    (section,) = re.findall(r"^## `valve tune run`\n(.*?)^## ", MANUAL, re.MULTILINE | re.DOTALL)
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][a-z0-9-]+)", section)}
    flags = {flag.removeprefix("no_") for flag in flags}

    assert len(flags) > 20
    others = {"online", "name", "load_format", "weight_cache_mode"}  # of `valve run`, of vLLM, of SGLang
    assert flags - FIELDS == {"num_train_epochs", "help", "to", *others}
    said = [each.removeprefix("--").replace("-", "_") for each in job_arguments() if each.startswith("--")]
    assert set(said) <= FIELDS
    assert {"model", "data", "out"} <= set(said)
