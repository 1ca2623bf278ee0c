"""OCI images made on the spot, so that a test pulls nothing: layer, config, manifest, and an index with a name."""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
SEARCH = "PATH=/usr/local/bin:/usr/bin:/bin"


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
    layer = path.with_suffix(".layer")
    _write_layer(layer, files, folders)
    try:
        _write_archive(path, name, layer, {"Entrypoint": list(command), "Env": [SEARCH, *env]})
    finally:
        layer.unlink()


def _write_archive(path: Path, name: str, layer: Path, settings: Mapping[str, object]) -> None:
    digest = _digest_of(layer)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    blobs = [json.dumps(config).encode()]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _described(CONFIG, blobs[0]),
        "layers": [{"mediaType": LAYER, "digest": digest, "size": layer.stat().st_size}],
    }
    blobs.append(json.dumps(manifest).encode())
    entry = {**_described(MANIFEST, blobs[1]), "annotations": {"io.containerd.image.name": name}}
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(archive, "index.json", json.dumps(index).encode())
        archive.add(layer, "blobs/sha256/" + digest.partition(":")[2])
        for blob in blobs:
            _add(archive, "blobs/sha256/" + _digest(blob).partition(":")[2], blob)


def _write_layer(path: Path, files: Mapping[str, Path], folders: Sequence[str]) -> None:
    with tarfile.open(path, "w") as layer:
        for folder in folders:
            entry = tarfile.TarInfo(folder.strip("/") + "/")
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            layer.addfile(entry)
        cleaned = {posixpath.normpath(inside): (inside, source) for inside, source in files.items()}
        for name, (inside, source) in cleaned.items():
            # A link stays one where it lies where it did.
            _add_file(layer, name.lstrip("/"), source if str(source) == inside else source.resolve())


def _add_file(layer: tarfile.TarFile, name: str, source: Path) -> None:
    """A file that has two names on this machine is two files: a clone may be full of such, as installers link from
    their caches, and a link to a file of another layer or of the same name is none."""
    entry = _for_everyone(layer.gettarinfo(source, name))
    if entry.islnk():
        entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", source.stat().st_size
    if not entry.isreg():
        layer.addfile(entry)
        return
    with source.open("rb") as content:
        layer.addfile(entry, content)


def _for_everyone(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Root's, and readable. The time stays: compiled Python names that of its source."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755
    return entry


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o755
    archive.addfile(entry, io.BytesIO(data))


def _described(kind: str, data: bytes) -> dict[str, str | int]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _digest_of(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            found.update(data)
    return "sha256:" + found.hexdigest()
