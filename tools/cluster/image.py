"""OCI images made on the spot, so that a test pulls nothing: layer, config, manifest, and an index with a name."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def write(
    path: Path,
    name: str,
    files: Mapping[str, Path],
    *,
    folders: Sequence[str] = (),
    command: Sequence[str] = (),
    env: Sequence[str] = (),
) -> None:
    """An archive that `ctr images import` takes. `files` are copied under their path in the image, all executable."""
    layer = _layer(files, folders)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(command), "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", *env]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = [layer, json.dumps(config).encode()]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _described(CONFIG, blobs[1]),
        "layers": [_described(LAYER, layer)],
    }
    blobs.append(json.dumps(manifest).encode())
    entry = {**_described(MANIFEST, blobs[2]), "annotations": {"io.containerd.image.name": name}}
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        for blob in blobs:
            _add(archive, "blobs/sha256/" + _digest(blob).partition(":")[2], blob)


def _layer(files: Mapping[str, Path], folders: Sequence[str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as layer:
        for folder in folders:
            entry = tarfile.TarInfo(folder.strip("/") + "/")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            layer.addfile(entry)
        for path, source in files.items():
            _add(layer, path.lstrip("/"), source.read_bytes())
    return made.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o755
    archive.addfile(entry, io.BytesIO(data))


def _described(kind: str, data: bytes) -> dict[str, str | int]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()
