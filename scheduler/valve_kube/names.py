"""Every name Valve uses in the Kubernetes API, from one domain."""

import os

# Set by the chart's `domain` value; everything below and the CRD group follow it.
DOMAIN = os.environ.get("VALVE_DOMAIN", "valve.gpu")

ROLE = f"{DOMAIN}/role"  # label or annotation: online | offline
ONLINE, OFFLINE = "online", "offline"

# Written by users, on pods.
SLA = f"{DOMAIN}/sla-throughput"  # share of standalone throughput, (0, 1]
PROFILE = f"{DOMAIN}/profile"  # OfflineProfile in the pod's namespace
KIND = f"{DOMAIN}/kind"  # batch or finetune; left out it is batch
BATCH, FINETUNE = "batch", "finetune"
BASE = f"{DOMAIN}/base"  # of finetune pods: the model they train; label of online pods: the model they serve
GPUS_REQUIRED = f"{DOMAIN}/gpus-required"  # of a pod without a limit: the webhook makes one of it
SLO = f"{DOMAIN}/slo"  # of online pods, and on namespaces: the target, as ttft=500ms,tpot=40ms,gap=100ms
GRANT = f"{DOMAIN}/grant"  # the same: "true" lets pauses within the target be given to offline work
SHARE_WEIGHTS = f"{DOMAIN}/share-weights"  # the same: "true" lets trainers map the weights
INJECT = f"{DOMAIN}/inject"  # "false": leave this pod alone

# Written by Valve, on pods; users may not.
GPUS = f"{DOMAIN}/gpus"  # UUIDs, in CUDA order
PREDICTED = f"{DOMAIN}/predicted-throughput"
DECISION = f"{DOMAIN}/decision-id"
INJECTION = f"{DOMAIN}/injection"  # ok | skipped-<why>
MODE = f"{DOMAIN}/mode"  # off, observe or harvest: how far Valve may go with this online pod
SHIM = f"{DOMAIN}/shim"  # version of the shim an online pod was injected with

# On namespaces.
TRUST = f"{DOMAIN}/trust-domain"  # namespaces of one value trust each other with memory

# On nodes.
KEEP_JOB = f"{DOMAIN}/keep-job"  # annotation of a Job: "true" has the webhook leave it as it is
EPOCH = f"{DOMAIN}/capacity-epoch"  # annotation, bumped so that kube-scheduler retries pending pods

RESOURCE = f"{DOMAIN}/harvested-gpu"
ONLINE_RESOURCE = "nvidia.com/gpu"
# By what names online pods hold GPUs: resources of a device plugin, renamed and shared ones too, and DRA drivers.
# Set by the chart's `admission.online.resources`.
ONLINE_RESOURCES = tuple(
    os.environ.get("VALVE_ONLINE_RESOURCES", f"{ONLINE_RESOURCE},nvidia.com/gpu.shared,gpu.nvidia.com").split(",")
)
SCHEDULER = "valve-scheduler"
PRIORITY_CLASS = "valve-offline"
API_VERSION = f"{DOMAIN}/v1alpha1"
API_PATH = f"/apis/{API_VERSION}"
ADMISSION_PATH = "/apis/admissionregistration.k8s.io/v1"
WEBHOOKS_PATH = f"{ADMISSION_PATH}/mutatingwebhookconfigurations"
